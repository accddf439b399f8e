"""Exchanges facts about layers between the stages of a pipeline, before collective set-up.

Groups are made by all ranks of a job in one order, but a stage sees its own layers only: it may have no experts and
nothing to cut, or layers of other sizes than the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.comm.job.job import Job
from deepspeed.comm.start.process_group import default_timeout
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.errors import DeepSpeedConfigError


def is_stage(model: nn.Module) -> bool:
    """Returns whether other ranks hold other layers of ``model``."""
    return bool(getattr(model, "is_part_of_model", False))


def is_pipeline(model: nn.Module) -> bool:
    """Returns whether ``model`` is a row of layers that may be divided over stages."""
    return bool(getattr(model, "is_pipeline", False))


def gather_from_stages(job: Job, model: nn.Module, device: torch.device, mine: Any, *, label: str) -> list[Any]:
    """Returns every rank's ``mine`` (small, of JSON) where ranks hold different layers. All ranks must call it.

    Else this rank's only, and nothing is communicated. ``label`` names the operation in timeout messages.
    """
    if not is_stage(model):
        return [mine]
    everybody = job.axis_of().transport("outside engines", device=device, timeout=default_timeout())
    return gather_objects(everybody, mine, label=label)


def raise_for_all_stages(
    job: Job,
    model: nn.Module,
    device: torch.device,
    count: int,
    problem: DeepSpeedConfigError | None,
    nothing: type,
    *,
    label: str,
) -> None:
    """Raises on every rank if some stage has a problem with its layers. Every rank of the job must call it.

    A problem of the kind ``nothing`` counts only if no stage has a ``count``, of what it has found.

    Raises:
        DeepSpeedConfigError: In the words of the first rank that has some.
    """
    mine = count, str(problem or ""), isinstance(problem, nothing)
    gathered = gather_from_stages(job, model, device, mine, label=label)
    for _, words, is_nothing in gathered:
        if words and not (is_nothing and any(found for found, _, _ in gathered)):
            raise DeepSpeedConfigError(words)
