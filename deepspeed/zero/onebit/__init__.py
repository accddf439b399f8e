"""Drives the optimizers of ``ops.onebit``, which exchange momenta instead of gradients."""

from __future__ import annotations

import torch

from deepspeed.ops.onebit import ZeroOneAdam
from deepspeed.zero.onebit.local_steps import LocalSteps
from deepspeed.zero.onebit.momentum import MomentumExchange


def momentum_driver_of(optimizer: torch.optim.Optimizer) -> MomentumExchange:
    """Returns the driver of an optimizer of the 1-bit family."""
    return LocalSteps(optimizer) if isinstance(optimizer, ZeroOneAdam) else MomentumExchange(optimizer)
