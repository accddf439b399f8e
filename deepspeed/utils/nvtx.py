"""Profiler ranges; re-exports; the code is in :mod:`deepspeed.profiling.ranges`."""

from __future__ import annotations

from deepspeed.profiling.ranges import instrument_w_nvtx

__all__ = [
    "instrument_w_nvtx",
]
