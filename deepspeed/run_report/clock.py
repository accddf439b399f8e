"""Time marks that cost no wait for the device."""

from __future__ import annotations

import time
from typing import Any, Protocol

from deepspeed.accelerator import get_accelerator


class PhaseClock(Protocol):
    """Sets marks in the work of a rank, and measures later how far apart they are."""

    def mark(self) -> Any:
        """Returns a mark behind all work queued on the device so far."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two marks; waits until the device has reached ``end``."""


class HostClock:
    """For devices that have finished when a call returns."""

    def mark(self) -> float:
        """Returns the current time, in seconds."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Returns the seconds between two moments."""
        return end - begin


class StreamClock:
    """For devices that run behind their host: marks are events on the current stream."""

    def mark(self) -> Any:
        """Records an event on the current stream."""
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two events; waits until the device has reached the later one."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def phase_clock() -> PhaseClock:
    """Returns the clock that fits the accelerator."""
    return HostClock() if get_accelerator().is_synchronized_device() else StreamClock()
