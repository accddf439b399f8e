"""What the stages of a pipeline tell each other of their experts, before anything is made together.

Groups are made by all ranks of a job in one order, but a stage sees its own layers only: it may have no experts, or
layers of other sizes than the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.comm.connect import shared_transport
from deepspeed.comm.objects import gather_objects
from deepspeed.comm.process_group import default_timeout


def is_stage(model: nn.Module) -> bool:
    """Whether other ranks hold other layers of ``model``."""
    return bool(getattr(model, "is_part_of_model", False))


def told_by_stages(model: nn.Module, device: torch.device, mine: Any, *, label: str) -> list[Any]:
    """Everybody's ``mine``, where ranks hold different layers; else this rank's only, and nothing is communicated.

    Args:
        model: Of this rank. Every rank of the job must call it.
        device: Where it computes.
        mine: Anything small that pickle takes.
        label: For whoever waits in vain.
    """
    if not is_stage(model):
        return [mine]
    return gather_objects(shared_transport(device=device, timeout=default_timeout()), mine, label=label)
