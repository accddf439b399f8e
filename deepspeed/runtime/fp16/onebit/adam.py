"""1-bit Adam; re-exports; the code is in :mod:`deepspeed.ops.onebit`."""

from __future__ import annotations

from deepspeed.ops.onebit.adam import OneBitAdam as OnebitAdam

__all__ = ["OnebitAdam"]
