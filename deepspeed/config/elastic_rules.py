"""Checks the section ``elasticity``, and replaces the caller's batch keys by its batch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from deepspeed.config.batch import ACCUMULATION, MICRO, TOTAL
from deepspeed.config.elastic_batch import choose_batch
from deepspeed.config.messages import ConfigMessages
from deepspeed.config.reader import BATCH_KEYS, is_auto
from deepspeed.config.sections.elasticity import OWN_KEYS, Elasticity
from deepspeed.config.sections.root import Root
from deepspeed.errors import ElasticityConfigError, ElasticityError

# Set by a scheduler that chooses the number of ranks: the section that it read.
SCHEDULER_VARIABLE = "DEEPSPEED_ELASTICITY_CONFIG"
_AT = "elasticity"
_AGREED = ("max_train_batch_size", "micro_batch_sizes", "version")
_REQUIRED = ("max_train_batch_size", "micro_batch_sizes")


def check_elasticity(root: Root, findings: ConfigMessages) -> None:
    """Reports contradictions within the section."""
    for name, text, *others in [] if root.elasticity is None else _problems(root.elasticity):
        findings.problem((_AT, name), text, *((_AT, other) for other in others))


def is_elastic(root: Root) -> bool:
    """Returns whether the section chooses the batch."""
    return root.elasticity is not None and root.elasticity.enabled


def _problems(section: Elasticity) -> Iterator[tuple[str, ...]]:
    if section.version not in (0.1, 0.2):
        yield "version", f"expected 0.1 or 0.2, found {section.version:g}"
    if section.min_gpus > section.max_gpus:
        yield "min_gpus", f"{section.min_gpus} is more than max_gpus {section.max_gpus}", "max_gpus"
    if section.continues:
        yield from _problems_of_continue(section)
    if not section.enabled:
        return
    for name in _REQUIRED:
        if name not in section.model_fields_set:
            yield name, "expected with elasticity.enabled: true, found nothing; give it"
    limit, micros = section.max_train_batch_size, section.micro_batch_sizes
    if not micros:
        yield "micro_batch_sizes", "expected at least one number of samples, found an empty list"
    elif max(micros) > limit:
        text = f"{max(micros)} is more than max_train_batch_size {limit}; drop it or raise the limit"
        yield "micro_batch_sizes", text, "max_train_batch_size"
    size, per_node = section.model_parallel_size, section.num_gpus_per_node
    if section.version < 0.2 and size > 1:
        yield "model_parallel_size", f"{size} needs elasticity.version 0.2, found {section.version:g}", "version"
    elif per_node % size:
        text = f"expected a multiple of model_parallel_size {size}, found {per_node}"
        yield "num_gpus_per_node", text, "model_parallel_size"


def _problems_of_continue(section: Elasticity) -> Iterator[tuple[str, ...]]:
    """Yields the problems of ``continue``, which keys about batch sizes do not belong to."""
    if section.enabled:
        text = "is true, but with elasticity.continue the batch stays when ranks come and go; set one of them to false"
        yield "enabled", text, "continue"
        return
    for name in sorted(section.model_fields_set - OWN_KEYS - {"enabled"}):
        yield name, "is about batch sizes that elasticity.enabled computes, which is false; leave it out"


def put_elastic_batch(root: Root, data: dict[str, Any], data_ranks: int | None, findings: ConfigMessages) -> Root:
    """Returns the configuration with section ``elasticity``'s batch for ``data_ranks``; open where that is None."""
    section = root.elasticity
    if section is None or not section.enabled:
        return root
    if any(path[:1] == (_AT,) for path in findings.failed) or any(_problems(section)):
        return root  # reported already
    given = [name for name in BATCH_KEYS if data.get(name) is not None and not is_auto(data[name])]
    if given and not section.ignore_non_elastic_batch_info:
        for name in given:
            findings.problem(
                (name,),
                "is chosen by section elasticity, but given here too; leave it out, or set "
                "elasticity.ignore_non_elastic_batch_info to true",
            )
        return root
    if data_ranks is None:
        return root.model_copy(update=dict.fromkeys(BATCH_KEYS))
    _compare_with_scheduler(section, findings)
    try:
        choice = choose_batch(section, data_ranks)
    except ElasticityError as error:
        findings.add((_AT,), str(error))
        return root
    assert choice.micro_batch_size is not None, "the number of ranks was given"
    total, micro = choice.train_batch_size, choice.micro_batch_size
    steps = total // micro // data_ranks
    if given:
        findings.notice(f"elasticity replaces {', '.join(findings.label((name,)) for name in given)}")
    findings.notice(f"elasticity: {TOTAL} {total} = {MICRO} {micro} x {ACCUMULATION} {steps} x {data_ranks} ranks")
    return root.model_copy(update={TOTAL: total, MICRO: micro, ACCUMULATION: steps})


def _compare_with_scheduler(section: Elasticity, findings: ConfigMessages) -> None:
    text = os.environ.get(SCHEDULER_VARIABLE)
    if text is None:
        return
    try:
        differences = differences_from_scheduler(section, text)
    except ElasticityConfigError as error:
        findings.add((_AT,), str(error))
        return
    for name, difference in differences.items():
        findings.problem((_AT, name), difference)


def differences_from_scheduler(section: Elasticity, text: str) -> dict[str, str]:
    """Returns a sentence for each key on which ``section`` and ``DEEPSPEED_ELASTICITY_CONFIG`` differ.

    Raises:
        ElasticityConfigError: The text is no JSON object.
    """
    try:
        theirs = json.loads(text)
    except ValueError:
        theirs = None
    if not isinstance(theirs, dict):
        raise ElasticityConfigError(
            f"{SCHEDULER_VARIABLE}: expected section elasticity as a JSON object, found {text[:80]!r}; unset it, or "
            "set it to what the scheduler has read"
        )
    found = {}
    for name in _AGREED:
        mine = getattr(section, name)
        if name in theirs and theirs[name] != mine:
            found[name] = (
                f"{mine} here, but {theirs[name]} in the scheduler's {SCHEDULER_VARIABLE}; give both the same section"
            )
    return found


def fit_shard_ranks(root: Root, data_ranks: int, findings: ConfigMessages) -> Root:
    """Returns the configuration with groups of MiCS or hpZ that fit the ranks there are, where their number may change.

    A group gets larger, never smaller, so that no rank holds more of the parameters than requested.
    """
    zero = root.zero_optimization
    if root.elasticity is None or not root.elasticity.continues or zero.stage < 3:
        return root
    changes = {}
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        size = getattr(zero, name)
        if size > 1 and data_ranks % size:
            fitting = (n for n in range(size, data_ranks) if data_ranks % n == 0)
            changes[name] = next(fitting, data_ranks)
            findings.notice(
                f"{findings.label(('zero_optimization', name))}: {size} does not divide the {data_ranks} ranks that "
                f"there are now; with elasticity.continue {changes[name]} of them share the parameters"
            )
    return root.model_copy(update={"zero_optimization": zero.model_copy(update=changes)}) if changes else root
