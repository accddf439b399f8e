"""The batch that many numbers of ranks can share: the two algorithms behind the section ``elasticity``.

Both start from bases, the micro-batches and their least common multiple, and multiply each by the largest highly
composite number that keeps it within the limit: such numbers have more divisors than any smaller one, and each divisor
is a number of ranks. Version 0.1 counts ranks, version 0.2 nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from deepspeed.config.sections.elasticity import Elasticity
from deepspeed.errors import ElasticityError, ElasticityIncompatibleWorldSize

_FACTORS = (2, 3, 5, 7, 11, 13)
# Larger batches than this times a micro-batch are multiplied by it anyway.
_LARGEST = 720_720


@dataclass(frozen=True)
class ElasticChoice:
    """A batch and the numbers of ranks that can share it."""

    train_batch_size: int  # samples per optimizer step
    data_ranks: tuple[int, ...]  # numbers of data-parallel ranks that share it in whole micro-batches, ascending
    # samples of one forward pass on one rank; None where the number of ranks is not known
    micro_batch_size: int | None = None


@cache
def highly_composite_numbers() -> tuple[int, ...]:
    """Returns the 38 numbers up to 720720 that have more divisors than any smaller number, ascending.

    Source: S. Ramanujan, Highly composite numbers, 1915: their prime factors are the first primes, with exponents that
    do not increase.
    """
    found = [(1, 1)]
    grown = [(1, 1, 64)]  # number, divisors, largest exponent of the next prime
    for prime in _FACTORS:
        grown = [
            (number * prime**power, divisors * (power + 1), power)
            for number, divisors, most in grown
            for power in range(1, most + 1)
            if number * prime**power <= _LARGEST
        ]
        found += [(number, divisors) for number, divisors, _ in grown]
    record, numbers = 0, []
    for number, divisors in sorted(found):
        if divisors > record:
            record = divisors
            numbers.append(number)
    return tuple(numbers)


def choose_batch(section: Elasticity, data_ranks: int | None = None) -> ElasticChoice:
    """Chooses the batch by the section's version; 0.1 without ``data_ranks`` leaves the micro-batch open.

    Raises:
        ElasticityError: No batch suits any allowed number of ranks, or version 0.2 without a number of ranks.
        ElasticityIncompatibleWorldSize: ``data_ranks`` cannot share the batch.
    """
    if section.version < 0.2:
        choice = _choose_by_ranks(section, section.max_train_batch_size, section.min_gpus, section.max_gpus)
        if data_ranks is None:
            return choice
        if data_ranks not in choice.data_ranks:
            raise ElasticityIncompatibleWorldSize(
                f"{data_ranks} data-parallel ranks cannot share elasticity's batch of {choice.train_batch_size} "
                f"samples in micro-batches of {section.micro_batch_sizes}; start one of "
                f"{_listed(choice.data_ranks)} ranks, or change micro_batch_sizes, max_train_batch_size, min_gpus or "
                "max_gpus"
            )
        return _with_micro_batch(section, choice, data_ranks, prefers_larger=True)
    if data_ranks is None:
        raise ElasticityError(
            "elasticity.version 0.2 chooses the batch for a number of ranks, and none is known; give world_size, or "
            "set WORLD_SIZE"
        )
    return _choose_by_nodes(section, data_ranks)


def _choose_by_nodes(section: Elasticity, data_ranks: int) -> ElasticChoice:
    """Chooses a batch by version 0.2: for whole nodes, or for the present ranks alone if whole nodes exclude them."""
    per_node = section.num_gpus_per_node // section.model_parallel_size
    least = -(-section.min_gpus // section.num_gpus_per_node)
    most = section.max_gpus // section.num_gpus_per_node
    try:
        choice = _choose_by_ranks(section, section.max_train_batch_size // per_node, least, most)
    except ElasticityError:  # for no number of whole nodes
        choice = ElasticChoice(0, ())
    batch, shared_by = choice.train_batch_size * per_node, tuple(nodes * per_node for nodes in choice.data_ranks)
    if data_ranks not in shared_by:
        batches = [
            section.max_train_batch_size // (micro * data_ranks) * micro * data_ranks
            for micro in section.micro_batch_sizes
        ]
        fitting = [each for each in batches if each > 0]
        if not fitting:
            raise ElasticityIncompatibleWorldSize(
                f"{data_ranks} data-parallel ranks cannot share a batch of elasticity.max_train_batch_size "
                f"{section.max_train_batch_size}: with micro_batch_sizes {section.micro_batch_sizes} it would need at "
                f"least {data_ranks * min(section.micro_batch_sizes)} samples. Raise the limit, or start fewer ranks"
            )
        batch, shared_by = (max if section.prefer_larger_batch else min)(fitting), (data_ranks,)
    choice = ElasticChoice(batch, shared_by)
    return _with_micro_batch(section, choice, data_ranks, prefers_larger=section.prefer_larger_batch)


def _choose_by_ranks(section: Elasticity, limit: int, least: int, most: int) -> ElasticChoice:
    """Chooses a batch by version 0.1: the candidate that most numbers from ``least`` to ``most`` can share."""
    micros = section.micro_batch_sizes
    common = math.lcm(*micros)
    bases = {*micros, common} if common <= limit else set(micros)
    best = ElasticChoice(0, ())
    for batch in sorted({base * _largest_factor(limit // base) for base in bases if base <= limit}):
        counts = _sharing(batch, micros, least, most)
        is_tie = len(counts) == len(best.data_ranks)
        if len(counts) > len(best.data_ranks) or (is_tie and counts and section.prefer_larger_batch):
            best = ElasticChoice(batch, counts)
    if not best.data_ranks:
        raise ElasticityError(
            f"elasticity: no batch up to max_train_batch_size {section.max_train_batch_size} suits micro_batch_sizes "
            f"{micros} on min_gpus {section.min_gpus} to max_gpus {section.max_gpus} ranks; raise the limit or lower "
            "min_gpus"
        )
    return best


def _with_micro_batch(
    section: Elasticity, choice: ElasticChoice, data_ranks: int, *, prefers_larger: bool
) -> ElasticChoice:
    share = choice.train_batch_size // data_ranks
    fitting = [micro for micro in section.micro_batch_sizes if share % micro == 0]
    micro = max(fitting) if prefers_larger else fitting[0]
    return ElasticChoice(choice.train_batch_size, choice.data_ranks, micro)


def _largest_factor(limit: int) -> int:
    """Returns the largest highly composite number up to ``limit``, which is at least 1."""
    return max(number for number in highly_composite_numbers() if number <= limit)


def _sharing(batch: int, micros: Sequence[int], least: int, most: int) -> tuple[int, ...]:
    counts: set[int] = set()
    for micro_batches in {batch // micro for micro in micros if batch % micro == 0}:
        counts |= divisors_of(micro_batches)
    return tuple(sorted(count for count in counts if least <= count <= most))


def divisors_of(number: int) -> set[int]:
    """Returns all divisors of a number above 0."""
    small = {each for each in range(1, math.isqrt(number) + 1) if number % each == 0}
    return small | {number // each for each in small}


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:16]))
    return f"{shown} and {len(numbers) - 16} more up to {numbers[-1]}" if len(numbers) > 16 else shown
