"""0/1 Adam; re-exports; the code is in :mod:`deepspeed.ops.onebit`."""

from __future__ import annotations

from deepspeed.ops.onebit.zero_one import ZeroOneAdam

__all__ = ["ZeroOneAdam"]
