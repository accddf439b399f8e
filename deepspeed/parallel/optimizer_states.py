"""Optimizers of the caller that have states of whole parameters."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.errors import DeepSpeedConfigError


def refuse_whole_states(optimizer: Any, size: int, key: str) -> None:
    """Raises for an optimizer that has states of whole parameters, which ``size`` ranks (by ``key``) will share.

    Raises:
        DeepSpeedConfigError: The optimizer has such states.
    """
    states = getattr(optimizer, "state", None) or {}
    if size > 1 and any(isinstance(value, torch.Tensor) for state in states.values() for value in state.values()):
        raise DeepSpeedConfigError(
            f"initialize(optimizer=<{type(optimizer).__name__}>) has states of {len(states)} whole parameters, "
            f"which {key} {size} is about to cut. Name the optimizer in the configuration, give one that has "
            f"no states yet, or train without {key.rpartition('.')[2]}, save a checkpoint, and load it into an "
            "engine with it"
        )
