"""Suggests changes of the configuration that make a job fit, the cheapest first, each confirmed by a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.plan.configs import changed, offloads_of, stage_of
from deepspeed.plan.planner import make_plan
from deepspeed.plan.result import Plan, Request

_WANTED = 3  # suggestions
_MOST_PLANS = 16
_MOST_SECONDS = 60.0  # after which no further change is tried: plans of large models take several seconds each
_SUBJECTS = ("stage", "checkpointing", "micro-batch", "offload")  # in the order in which changes are applied


@dataclass(frozen=True)
class AdviceEntry:
    """One change that saves memory."""

    name: str  # describes it in a table
    subject: str  # what it changes; a combination holds at most one change of a subject
    apply: Callable[[Request], Request]  # returns the changed request


def advise(plan: Plan) -> list[tuple[str, Plan]]:
    """Returns up to three pairs of a change in words and its plan, after which a job that does not fit does.

    Single changes are tried before pairs, pairs before threes, and only those that help alone are combined. Of the
    combinations with the fewest changes that fit, the ones with the shortest possible step come first.
    """
    changes = list(_changes(plan))
    end = time.monotonic() + _MOST_SECONDS
    saved: dict[AdviceEntry, int] = {}
    tried = 0
    for count in range(1, len(changes) + 1):
        found: list[tuple[str, Plan]] = []
        for chosen in combinations(changes, count):
            if len({change.subject for change in chosen}) < count or tried >= _MOST_PLANS or time.monotonic() > end:
                continue
            tried += 1
            other = _planned(plan.request, chosen)
            if other is None:
                continue
            if count == 1:
                saved[chosen[0]] = plan.device_bytes - other.device_bytes
            if other.fits:
                found.append((" and ".join(change.name for change in chosen), other))
        if found:
            return sorted(found, key=lambda entry: entry[1].step_seconds or 0.0)[:_WANTED]
        if count == 1:
            changes = sorted((c for c in changes if saved.get(c, 0) > 0), key=lambda c: -saved[c])
    return []


def _planned(request: Request, changes: tuple[AdviceEntry, ...]) -> Plan | None:
    for change in sorted(changes, key=lambda change: _SUBJECTS.index(change.subject)):
        request = change.apply(request)
    try:
        return make_plan(request, compare=False)
    except (DeepSpeedConfigError, NotYetSupportedError):
        return None  # the engine refuses this configuration


def _changes(plan: Plan) -> Iterator[AdviceEntry]:
    """Yields possible changes, the strongest of each subject first, so that few combinations have to be planned."""
    request, config = plan.request, plan.config
    zero = config.get("zero_optimization") or {}
    stage, ranks = stage_of(config), request.machine.ranks
    if ranks > 1:
        if stage < 3:
            yield _zero("stage 3", "stage", stage=3)
        if stage < 2:
            yield _zero("stage 2", "stage", stage=2)
    if not request.checkpointing:
        yield AdviceEntry("activation checkpointing", "checkpointing", lambda r: replace(r, checkpointing=True))
    if plan.micro_batch > 1:
        yield _micro_batch(plan, 1)
        if plan.micro_batch > 3:
            yield _micro_batch(plan, plan.micro_batch // 2)
    optimizer, _ = offloads_of(config)
    if optimizer == "none":
        yield AdviceEntry("optimizer on the host", "offload", _optimizer_on_host)
        yield _zero(
            "stage 3 with optimizer and parameters on the host",
            "offload",
            stage=3,
            offload_optimizer={"device": "cpu"},
            offload_param={"device": "cpu"},
        )
    if optimizer != "nvme":
        path = (zero.get("offload_optimizer") or {}).get("nvme_path") or "/local_nvme"
        files = {"device": "nvme", "nvme_path": path}
        yield _zero(
            "stage 3 with optimizer and parameters on NVMe",
            "offload",
            stage=3,
            offload_optimizer=files,
            offload_param={**files, "buffer_size": plan.simulated.parameters},
        )
    if ranks > request.machine.devices_per_node > 1 and stage < 3:
        yield _zero("stage 3 within each node", "stage", stage=3, mics_shard_size=request.machine.devices_per_node)


def _zero(name: str, subject: str, **keys: Any) -> AdviceEntry:
    return AdviceEntry(name, subject, lambda request: replace(request, config=changed(request.config, **keys)))


def _optimizer_on_host(request: Request) -> Request:
    """Moves the optimizer to the host, at stage 2 or above: below it the device keeps whole gradients."""
    stage = max(stage_of(request.config), 2)
    return replace(request, config=changed(request.config, stage=stage, offload_optimizer={"device": "cpu"}))


def _micro_batch(plan: Plan, samples: int) -> AdviceEntry:
    """Returns a smaller micro-batch with more accumulation steps: the batch size stays the same."""
    steps = -(-plan.micro_batch * plan.accumulation_steps // samples)

    def apply(request: Request) -> Request:
        return replace(request, micro_batch=samples, accumulation=steps)

    return AdviceEntry(f"micro-batch {samples} x {steps}", "micro-batch", apply)
