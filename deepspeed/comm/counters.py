"""Counts what travels: the collectives that the schedule asked for, and what the backend ran for them.

Both columns are kept because they differ where a backend has something faster than the collective of that name (on gloo
an all-gather is a set of sends and receives).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Tally:
    """Number of operations and the bytes that this rank sends for them."""

    calls: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, calls: int = 1) -> None:
        """Adds to the books."""
        self.calls += calls
        self.nbytes += nbytes


class TrafficCounter:
    """Traffic since the last :meth:`reset`, by name of the collective.

    Bytes of ``asked`` are those of the *full* buffer of the collective, the figure that the ZeRO paper counts (an
    all-gather of n elements counts n, a reduce-scatter of n counts n, an all-reduce counts 2n); bytes of ``ran`` are
    what this rank put on the wire.
    """

    def __init__(self) -> None:
        self.asked: dict[str, Tally] = defaultdict(Tally)
        self.ran: dict[str, Tally] = defaultdict(Tally)

    def reset(self) -> None:
        """Starts again from zero."""
        self.asked.clear()
        self.ran.clear()

    def record_asked(self, name: str, nbytes: int) -> None:
        """Notes a collective of the schedule."""
        self.asked[name].add(nbytes)

    def record_ran(self, name: str, nbytes: int, calls: int = 1) -> None:
        """Notes what the backend ran."""
        self.ran[name].add(nbytes, calls)

    def rows(self) -> list[tuple[str, str, int, int]]:
        """``(column, name, calls, bytes)`` for each name, both columns."""
        return [
            (column, name, tally.calls, tally.nbytes)
            for column, tallies in (("asked", self.asked), ("ran", self.ran))
            for name, tally in sorted(tallies.items())
        ]


class WaitClock:
    """Seconds that this process's thread was blocked in waits for other ranks, while ``is_running``.

    It runs while somebody reads it: two readings of the clock per wait are cheap, but not free.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.seconds = 0.0
        self._readers = 0

    def start(self) -> None:
        """One reader more."""
        self._readers += 1
        self.is_running = True

    def stop(self) -> None:
        """One reader less."""
        self._readers -= 1
        self.is_running = self._readers > 0


waiting = WaitClock()
"""Of this process. With a device's own collectives (NCCL) the host hardly blocks; the device waits instead."""

traffic = TrafficCounter()
"""Of this process."""


@contextmanager
def counted() -> Iterator[TrafficCounter]:
    """Gives the process's counter, starting from zero when the block is entered."""
    traffic.reset()
    yield traffic
