"""Degrees of parallelism that a plan can set: a table with a row for each axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from deepspeed.axes import EXPERT, PIPE, ROWS, AxisRow
from deepspeed.plan.result import Request


@dataclass(frozen=True)
class DegreeRow:
    """A degree that a plan can set."""

    text: str  # meaning and default: the help text of ``ds_plan``
    apply: Callable[[Request, int], Request]  # returns a request with this degree
    default: int | None = None  # used by ``plan`` if it is not given; None: the value of the configuration


def _with_key(key: str, request: Request, ranks: int) -> Request:
    """Sets the key of an axis; for 1 rank removes it, as the default is no such axis."""
    *sections, name = key.split(".")
    owner = dict((request.config.get(sections[0]) or {}) if sections else request.config)
    owner.pop(name, None)
    if ranks > 1:
        owner[name] = ranks
    return replace(request, config={**request.config, sections[0]: owner} if sections else owner)


def _with_expert_ranks(request: Request, ranks: int) -> Request:
    if request.source.spread is not None:
        return replace(request, source=request.source.spread(ranks))
    section = request.config.get("expert_parallel") or {}
    config = {**request.config, "expert_parallel": {**section, "enabled": ranks > 1, "autoep_size": ranks}}
    return replace(request, config=config)


_OF_THE_MODEL: dict[str, Callable[[Request, int], Request]] = {
    PIPE: lambda request, stages: replace(request, pipeline=replace(request.pipeline, stages=stages)),
    EXPERT: _with_expert_ranks,
}
"""Axes whose size is not set by a single key of the configuration."""


def _degree_row(row: AxisRow) -> DegreeRow:
    default = "1" if row.key is None else f"the configuration's {row.key.rpartition('.')[2]}"
    return DegreeRow(
        f"{row.counts}; default: {default}",
        _OF_THE_MODEL.get(row.name) or partial(_with_key, row.key or row.name),
        default=1 if row.key is None else None,
    )


DEGREES: Mapping[str, DegreeRow] = {
    row.option: _degree_row(row)
    for row in (ROWS[0], *ROWS[:0:-1])  # stages first, then what lies on one node
    if row.option is not None
}
"""By the name of the keyword and of the option."""


def at_degrees(request: Request, **degrees: int | None) -> Request:
    """Returns the request with these degrees, by the names of :data:`DEGREES`; None: as the request has it."""
    for name, row in DEGREES.items():
        if (degree := degrees.get(name)) is not None:
            request = row.apply(request, degree)
    return request
