"""Upstream's import path for names of ``ops.onebit.adam``."""

from deepspeed.ops.onebit.adam import OneBitAdam as OnebitAdam

__all__ = ["OnebitAdam"]
