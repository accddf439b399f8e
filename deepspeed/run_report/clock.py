"""Measures time on the host or on a device's stream, without waiting for the device."""

from __future__ import annotations

import time
from typing import Any

from typing_extensions import override

from deepspeed.accelerator import get_accelerator


class PhaseClock:
    """Sets time marks in the work of a rank, by the host's clock: for devices whose operations end with their calls."""

    def mark(self) -> Any:
        """Returns a mark that the device reaches after all work queued so far."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two marks; waits until the device has reached ``end``."""
        return end - begin


class StreamClock(PhaseClock):
    """The clock of devices that run behind their host: marks are events on the current stream."""

    @override
    def mark(self) -> Any:
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    @override
    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def phase_clock() -> PhaseClock:
    """Returns the clock for the present accelerator."""
    return PhaseClock() if get_accelerator().is_synchronized_device() else StreamClock()
