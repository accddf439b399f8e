"""Measures time on the host or on a device's stream, without waiting for the device."""

from __future__ import annotations

import time
from typing import Any, Protocol

from deepspeed.accelerator import get_accelerator


class PhaseClock(Protocol):
    """Sets time marks in the work of a rank; their distances are read later."""

    def mark(self) -> Any:
        """Returns a mark that the device reaches after all work queued so far."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two marks; waits until the device has reached ``end``."""


class HostClock:
    """The clock of devices that have finished an operation when its call returns."""

    def mark(self) -> float:
        """Returns the current time, in seconds."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Returns the seconds between two marks."""
        return end - begin


class StreamClock:
    """The clock of devices that run behind their host: marks are events on the current stream."""

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
    """Returns the clock for the present accelerator."""
    return HostClock() if get_accelerator().is_synchronized_device() else StreamClock()
