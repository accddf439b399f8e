"""What a rank does in a step, as a list; and what passes between a model and its driver."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.gather.outputs import tensors_in


class Act(Enum):
    """What a rank does with a micro-batch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


@dataclass(frozen=True)
class SimulatedAction:
    """One act of a step.

    Attributes:
        act: What is done.
        micro_batch: With which micro-batch, from 0.
    """

    act: Act
    micro_batch: int


def actions_of_step(micro_batches: int) -> list[SimulatedAction]:
    """What a rank without stages does: each micro-batch forward and backward."""
    return [SimulatedAction(act, number) for number in range(micro_batches) for act in Act]


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss in what a model returned: the tensor itself, ``.loss``, or the first member.

    Raises:
        DeepSpeedConfigError: There is no tensor of floating dtype.
    """
    if isinstance(outputs, dict) and "loss" in outputs:
        outputs = outputs["loss"]
    found = getattr(outputs, "loss", None)
    if not isinstance(found, torch.Tensor):
        found = next((t for t in _in_order(outputs) if t.is_floating_point()), None)
    if found is None:
        raise DeepSpeedConfigError(f"plan: the model returned {type(outputs).__name__} without a floating tensor")
    return found if found.numel() == 1 else found.float().mean()


def _in_order(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, (tuple, list)):
        for item in outputs:
            yield from _in_order(item)
    else:
        yield from tensors_in(outputs)
