"""Counts traffic by collective and axis: collectives that the schedule requested, and what the backend ran for them.

They differ where a backend replaces a collective by something faster (on gloo
an all-gather is a set of sends and receives).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

PROGRAM = "program"
"""Axis name of calls of ``deepspeed.comm`` by the program."""
JOB = "job"
"""Axis name of exchanges between all ranks if these do not all lie along the data axis."""


@dataclass
class Tally:
    """Number of operations and the bytes that this rank sends for them."""

    calls: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, calls: int = 1) -> None:
        """Adds to the counters."""
        self.calls += calls
        self.nbytes += nbytes


class TrafficCounter:
    """Traffic since the last :meth:`reset`, by name of the collective and by axis, the name of the ranks it is between.

    Bytes of ``requested`` are those of the *full* buffer of the collective, the figure that the ZeRO paper counts (an
    all-gather of n elements counts n, a reduce-scatter of n counts n, an all-reduce counts 2n); bytes of ``ran`` are
    what this rank has sent.
    """

    def __init__(self) -> None:
        # collectives of the schedule, by ``(name, axis)``
        self.requested_along: dict[tuple[str, str], Tally] = defaultdict(Tally)
        self.ran_along: dict[tuple[str, str], Tally] = defaultdict(Tally)  # what the backend ran, in the same form

    @property
    def requested(self) -> dict[str, Tally]:
        """Collectives of the schedule by name, over all axes; a name that did not occur is zero."""
        return _over_axes(self.requested_along)

    @property
    def ran(self) -> dict[str, Tally]:
        """Returns what the backend ran by name, over all axes; a name that did not occur is zero."""
        return _over_axes(self.ran_along)

    def reset(self) -> None:
        """Starts again from zero."""
        self.requested_along.clear()
        self.ran_along.clear()

    def record_requested(self, name: str, nbytes: int, axis: str) -> None:
        """Records a collective of the schedule."""
        self.requested_along[name, axis].add(nbytes)

    def record_ran(self, name: str, nbytes: int, axis: str, calls: int = 1) -> None:
        """Records what the backend ran."""
        self.ran_along[name, axis].add(nbytes, calls)


def _over_axes(along: dict[tuple[str, str], Tally]) -> dict[str, Tally]:
    total: dict[str, Tally] = defaultdict(Tally)
    for (name, _), tally in along.items():
        total[name].add(tally.nbytes, tally.calls)
    return total


class WaitTracker(Protocol):
    """Records each wait for other ranks."""

    def wait_begins(self, axis: str, label: str) -> Any:
        """Returns a token for a wait along ``axis`` that begins now; ``label`` describes the transfer."""

    def wait_ends(self, axis: str, mark: Any) -> None:
        """Records the end of the wait along ``axis`` for which ``wait_begins`` returned ``mark``."""


class WaitClock:
    """Seconds that this process's thread was blocked in waits for other ranks, while ``is_running``.

    It runs only while it has readers, because each wait then reads the clock twice.
    """

    def __init__(self) -> None:
        self.is_running = False  # whether waits are timed
        self.seconds = 0.0  # seconds of all waits so far
        self._readers = 0
        self._trackers: list[WaitTracker] = []

    def start(self, tracker: WaitTracker | None = None) -> None:
        """Adds a reader, and its tracker if it has one."""
        self._readers += 1
        self.is_running = True
        if tracker is not None:
            self._trackers.append(tracker)

    def stop(self, tracker: WaitTracker | None = None) -> None:
        """Removes a reader and its tracker."""
        self._readers -= 1
        self.is_running = self._readers > 0
        if tracker is not None:
            self._trackers.remove(tracker)

    def run(self, blocking: Callable[[], Any], axis: str, label: str) -> None:
        """Runs and times a wait for the ranks along ``axis``; ``label`` describes the transfer."""
        marks = [(tracker, tracker.wait_begins(axis, label)) for tracker in self._trackers]
        start = time.perf_counter()
        blocking()
        self.seconds += time.perf_counter() - start
        for tracker, mark in marks:
            tracker.wait_ends(axis, mark)


waiting = WaitClock()
"""The clock of this process. With NCCL the host hardly blocks; the device waits instead."""

traffic = TrafficCounter()
"""The counter of this process."""


@contextmanager
def counted() -> Iterator[TrafficCounter]:
    """Yields the process's counter, reset at the start of the block."""
    traffic.reset()
    yield traffic
