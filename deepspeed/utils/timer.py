"""Timers; re-exports; the code is in :mod:`deepspeed.profiling.timer`."""

from __future__ import annotations

from deepspeed.profiling.timer import NoopTimer, SynchronizedWallClockTimer, ThroughputTimer

__all__ = [
    "NoopTimer",
    "SynchronizedWallClockTimer",
    "ThroughputTimer",
]
