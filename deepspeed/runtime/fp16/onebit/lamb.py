"""1-bit LAMB; re-exports; the code is in :mod:`deepspeed.ops.onebit`."""

from __future__ import annotations

from deepspeed.ops.onebit.lamb import OneBitLamb as OnebitLamb

__all__ = ["OnebitLamb"]
