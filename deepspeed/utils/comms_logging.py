"""The communication log; re-exports; the code is in :mod:`deepspeed.comm.recorder`."""

from __future__ import annotations

from deepspeed.comm.recorder import CommsLog as CommsLogger

__all__ = [
    "CommsLogger",
]
