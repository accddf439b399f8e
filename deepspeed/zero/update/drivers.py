"""Chooses what the updates of an optimizer exchange."""

from __future__ import annotations

import torch

from deepspeed.ops.onebit.phases import ExchangesMomentum
from deepspeed.zero.update.driver import MeanGradient, UpdateDriver


def driver_of(optimizer: torch.optim.Optimizer | None) -> UpdateDriver:
    """Returns the driver for what the updates of an optimizer exchange."""
    if isinstance(optimizer, ExchangesMomentum):
        from deepspeed.zero.onebit import momentum_driver_of  # few train with it

        return momentum_driver_of(optimizer)
    return MeanGradient()
