"""The 1-bit family: optimizers that exchange their momentum in one bit for each element."""

from __future__ import annotations

from deepspeed.ops.onebit.adam import OneBitAdam
from deepspeed.ops.onebit.lamb import OneBitLamb
from deepspeed.ops.onebit.zero_one import ZeroOneAdam

__all__ = ["OneBitAdam", "OneBitLamb", "ZeroOneAdam"]
