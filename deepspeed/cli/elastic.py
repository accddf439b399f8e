"""``ds_elastic``: shows the batch size that fits most numbers of ranks, by a configuration's ``elasticity``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from deepspeed.cli.command import run_command
from deepspeed.config import load_ds_config
from deepspeed.config.elastic_batch import divisors_of
from deepspeed.config.sections.elasticity import Elasticity
from deepspeed.elasticity.elasticity import ElasticityConfig, compute_elastic_config
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.release import VERSION


@dataclass(frozen=True)
class ElasticBatch:
    """A batch size and the numbers of ranks that can share it."""

    train_batch_size: int  # samples per optimizer step
    micro_batch_size: dict[int, int]  # number of ranks -> the largest micro-batch that fits


def best_batch(section: Elasticity) -> ElasticBatch:
    """Returns the batch size that most numbers of ranks can share in whole micro-batches.

    Of equally good ones it is the largest if the section has ``prefer_larger_batch``, otherwise the smallest.

    Raises:
        DeepSpeedConfigError: No batch within the limit suits any allowed number of ranks, or there are too many.
    """
    limit = section.max_train_batch_size
    signs = _signs(section, limit)
    _check_work(section, signs)
    best = ElasticBatch(0, {})
    most = 0
    for start in range(1, limit + 1, _CHUNK):
        counts = _count_ranks(start, min(start + _CHUNK, limit + 1), section, signs)
        highest = int(counts.max())
        if highest > most or (highest == most and most and section.prefer_larger_batch):
            most = highest
            places = numpy.flatnonzero(counts == highest)
            total = start + int(places[-1 if section.prefer_larger_batch else 0])
            best = ElasticBatch(total, _shared_by(total, section))
    if not best.micro_batch_size:
        raise DeepSpeedConfigError(
            f"elasticity: no batch up to max_train_batch_size {limit} suits micro_batch_sizes "
            f"{section.micro_batch_sizes} on {section.min_gpus} to {section.max_gpus} ranks; raise the limit or lower "
            "min_gpus"
        )
    return best


_CHUNK = 1 << 22  # batches counted at once
_MOST_BATCHES = 10_000_000
_MOST_ROUNDS = 500_000  # of the inner loop: a few seconds


def _check_work(section: Elasticity, signs: Mapping[int, int]) -> None:
    limit = section.max_train_batch_size
    if limit > _MOST_BATCHES:
        raise DeepSpeedConfigError(
            f"--search: expected elasticity.max_train_batch_size up to {_MOST_BATCHES:,}, found {limit:,}; lower it, "
            "or leave --search out"
        )
    allowed = _MOST_ROUNDS // (len(range(0, limit, _CHUNK)) * max(len(signs), 1))
    if _most_ranks(section, limit) - section.min_gpus > allowed:
        raise DeepSpeedConfigError(
            f"--search: expected at most {allowed:,} numbers of ranks for batches up to {limit:,} of these "
            f"micro_batch_sizes, found elasticity.min_gpus {section.min_gpus:,} and max_gpus {section.max_gpus:,}; "
            "lower max_gpus or max_train_batch_size, or leave --search out"
        )


def _most_ranks(section: Elasticity, limit: int) -> int:
    """Returns the largest number of ranks that can share a batch of up to ``limit`` samples."""
    return min(section.max_gpus, limit // min(section.micro_batch_sizes) * section.model_parallel_size)


def _signs(section: Elasticity, limit: int) -> dict[int, int]:
    """Returns the multiples of samples of each data rank to count, with how often: below 0 to subtract.

    A batch suits n ranks if n times a micro-batch divides it. Inclusion and exclusion: multiples of two such products,
    which are those of their least common multiple, count once. A micro-batch that another one divides adds none.
    """
    micros = sorted(set(section.micro_batch_sizes))
    signs: Counter[int] = Counter()
    for micro in micros:
        if any(micro % other == 0 for other in micros if other < micro):
            continue
        for multiple, sign in [(1, -1), *signs.items()]:
            if (common := math.lcm(multiple, micro)) <= limit:
                signs[common] -= sign
    return {multiple: sign for multiple, sign in signs.items() if sign}


def _count_ranks(start: int, stop: int, section: Elasticity, signs: Mapping[int, int]) -> NDArray[numpy.int32]:
    """Returns for each batch of ``range(start, stop)`` how many numbers of ranks can share it, as a sieve does."""
    counts = numpy.zeros(stop - start, numpy.int32)
    model_parallel, step = section.model_parallel_size, _step(section)
    for ranks in range(section.min_gpus, _most_ranks(section, stop) + 1):
        data, left = divmod(ranks, model_parallel)
        if left or not data or ranks % step:
            continue
        for multiple, sign in signs.items():
            each = data * multiple
            if each < stop:
                counts[-start % each :: each] += sign
    return counts


def _step(section: Elasticity) -> int:
    return section.num_gpus_per_node if section.version >= 0.2 else 1


def _shared_by(total: int, section: Elasticity) -> dict[int, int]:
    """Returns the numbers of ranks that can share ``total`` samples, with the largest micro-batch of each."""
    found: dict[int, int] = {}
    for micro in sorted(section.micro_batch_sizes):
        if total % micro == 0:
            micro_batches = total // micro
            found.update(dict.fromkeys(divisors_of(micro_batches), micro))
    step = _step(section)
    model_parallel = section.model_parallel_size
    by_ranks = {ranks * model_parallel: micro for ranks, micro in found.items()}
    return {
        ranks: by_ranks[ranks]
        for ranks in sorted(by_ranks)
        if section.min_gpus <= ranks <= section.max_gpus and (step == 1 or ranks % step == 0)
    }


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="ds_elastic", allow_abbrev=False, description=__doc__)
    parser.add_argument("-c", "--config", required=True, help="a configuration with a section 'elasticity'")
    parser.add_argument("-w", "--world-size", type=int, default=0, help="show the micro-batch for this number of ranks")
    parser.add_argument(
        "--search", action="store_true", help="also search over all batches; set the batch keys to its result"
    )
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None) -> None:
    """Prints the section, the batch and the numbers of ranks that can share it."""
    run_command("ds_elastic", lambda: _show(parse_args(args)), args)


def _show(args: argparse.Namespace) -> None:
    config = load_ds_config(args.config)
    if not isinstance(config.get("elasticity"), dict):
        raise DeepSpeedConfigError(
            f"{args.config}: expected a section 'elasticity', found none; see docs/reference/config.md"
        )
    section = {**config["elasticity"], "enabled": True}  # enabled here even if training does not use it
    batch, counts, *micro = compute_elastic_config({"elasticity": section}, VERSION, world_size=args.world_size)
    rule = "-" * 42
    lines = [rule, "Elasticity config:", rule, json.dumps(config["elasticity"], sort_keys=True, indent=4)]
    lines += [rule, "Calculated results:", rule]
    lines += [f"final_batch_size .... {batch}", f"valid_gpus .......... {counts}"]
    lines += [f"micro_batch_size .... {each}" for each in micro]
    if args.search:
        lines += ["", *_search(args, ElasticityConfig(section).section)]
    sys.stdout.write("\n".join(lines) + "\n")


def _search(args: argparse.Namespace, section: Elasticity) -> list[str]:
    batch = best_batch(section)
    counts = ", ".join(map(str, batch.micro_batch_size))
    lines = [f"train_batch_size: {batch.train_batch_size}", f"numbers of ranks that can share it: {counts}"]
    if args.world_size:
        micro = batch.micro_batch_size.get(args.world_size)
        if micro is None:
            raise DeepSpeedConfigError(
                f"--world-size {args.world_size}: that many ranks cannot share {batch.train_batch_size} samples in "
                f"micro-batches of {section.micro_batch_sizes}; choose one of {counts}"
            )
        steps = batch.train_batch_size // micro * section.model_parallel_size // args.world_size
        lines.append(
            f"with {args.world_size} ranks: train_micro_batch_size_per_gpu {micro}, gradient_accumulation_steps {steps}"
        )
    return lines


if __name__ == "__main__":
    main()
