"""Upstream's import path for names of ``ops.onebit.lamb``."""

from deepspeed.ops.onebit.lamb import OneBitLamb as OnebitLamb

__all__ = ["OnebitLamb"]
