"""``OnDevice``; re-exports; the code is in :mod:`deepspeed.precision.on_device`."""

from __future__ import annotations

from deepspeed.precision.on_device import OnDevice

__all__ = [
    "OnDevice",
]
