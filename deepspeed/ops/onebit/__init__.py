"""The 1-bit family: optimizers that exchange their momentum in one bit for each element."""

from __future__ import annotations

from deepspeed.ops.onebit.adam import OneBitAdam
from deepspeed.ops.onebit.lamb import OneBitLamb

__all__ = ["OneBitAdam", "OneBitLamb"]
