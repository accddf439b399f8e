"""A request with other degrees along the axes of the job."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from deepspeed.plan.result import Request

DEGREES = ("pipe", "tensor", "sequence", "ep")
"""What can be given: stages, ranks that share layers, sequences, experts."""


def at_degrees(
    request: Request,
    *,
    pipe: int | None = None,
    tensor: int | None = None,
    sequence: int | None = None,
    ep: int | None = None,
) -> Request:
    """The request with these degrees; None: as its configuration says.

    Args:
        request: The request.
        pipe: Stages of the pipeline.
        tensor: Ranks that share layers (``tensor_parallel.autotp_size``).
        sequence: Ranks that share a sequence (``sequence_parallel_size``).
        ep: Ranks that share experts: of a model that is made by its sizes, or ``expert_parallel.autoep_size``.
    """
    config: dict[str, Any] = copy.deepcopy(dict(request.config))
    source, pipeline = request.source, request.pipeline
    if pipe is not None:
        pipeline = replace(pipeline, stages=pipe)
    if tensor is not None:
        section = dict(config.get("tensor_parallel") or {})
        config["tensor_parallel"] = {**section, "autotp_size": tensor if tensor > 1 else 0}
    if sequence is not None:
        config["sequence_parallel_size"] = sequence
    if ep is not None and source.spread is not None:
        source = source.spread(ep)
    elif ep is not None:
        section = dict(config.get("expert_parallel") or {})
        config["expert_parallel"] = {**section, "enabled": ep > 1, "autoep_size": ep}
    return replace(request, config=config, source=source, pipeline=pipeline)
