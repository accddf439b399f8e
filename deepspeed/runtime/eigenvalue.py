"""Eigenvalues of blocks; re-exports; the code is in :mod:`deepspeed.compression`."""

from __future__ import annotations

from deepspeed.compression.eigenvalue import Eigenvalue

__all__ = ["Eigenvalue"]
