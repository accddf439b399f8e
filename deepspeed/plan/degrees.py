"""Requests for plans with other degrees of parallelism: a row for each axis that can be given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.plan.result import Request


@dataclass(frozen=True)
class DegreeRow:
    """A degree that a plan can be asked for.

    Attributes:
        text: What it counts, and its default; the help text of ``ds_plan``.
        apply: Returns a request with this degree.
        default: Used by ``plan`` if it is not given; None: the value of the configuration.
    """

    text: str
    apply: Callable[[Request, int], Request]
    default: int | None = None


def _with_setting(request: Request, **sections: Any) -> Request:
    return replace(request, config={**request.config, **sections})


def _with_stages(request: Request, stages: int) -> Request:
    return replace(request, pipeline=replace(request.pipeline, stages=stages))


def _with_tensor_ranks(request: Request, ranks: int) -> Request:
    section = request.config.get("tensor_parallel") or {}
    return _with_setting(request, tensor_parallel={**section, "autotp_size": ranks if ranks > 1 else 0})


def _with_sequence_ranks(request: Request, ranks: int) -> Request:
    return _with_setting(request, sequence_parallel_size=ranks)


def _with_expert_ranks(request: Request, ranks: int) -> Request:
    """Spreads the experts: in the model's source if it is made from sizes, otherwise in the configuration."""
    if request.source.spread is not None:
        return replace(request, source=request.source.spread(ranks))
    section = request.config.get("expert_parallel") or {}
    return _with_setting(request, expert_parallel={**section, "enabled": ranks > 1, "autoep_size": ranks})


DEGREES: Mapping[str, DegreeRow] = {
    "pipe": DegreeRow("number of pipeline stages; default: 1", _with_stages, default=1),
    "tensor": DegreeRow("tensor-parallel ranks; default: the configuration's autotp_size", _with_tensor_ranks),
    "sequence": DegreeRow(
        "sequence-parallel ranks; default: the configuration's sequence_parallel_size", _with_sequence_ranks
    ),
    "ep": DegreeRow("expert-parallel ranks; default: the configuration's autoep_size", _with_expert_ranks),
}
"""By the name of the keyword and of the option."""


def at_degrees(request: Request, **degrees: int | None) -> Request:
    """Returns the request with these degrees.

    Args:
        request: The request.
        **degrees: By the names of :data:`DEGREES`; None: as the request has it.
    """
    for name, row in DEGREES.items():
        if (degree := degrees.get(name)) is not None:
            request = row.apply(request, degree)
    return request
