"""Alternates updates with plain and with encoded gradients, and keeps the faster way.

The speed of a link, and how much of the waiting overlaps with computation, are unknown before training. So both ways
are timed in training: whole updates in alternating blocks, so that other load on the machine affects both. The first
updates are not counted, since they allocate memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from deepspeed.comm.transports.transport import Transport

_FIRST = (False, False, True)  # not counted
_COUNTED = (False, False, False, True, True, True) * 2
UPDATES = len(_FIRST) + len(_COUNTED)


class Trial:
    """Decides between the two ways."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.outcome = ""  # what was found, for the log; empty until it is decided
        self._clock = clock
        self._plan = [*((way, False) for way in _FIRST), *((way, True) for way in _COUNTED)]
        self._present: tuple[bool, bool] | None = None
        self._started = 0.0
        self._took: dict[bool, list[float]] = {False: [], True: []}
        self._decided: bool | None = None

    def next(self, peers: Transport) -> bool:
        """Returns whether the next update sends codes, by the slowest rank. Every rank must call it between updates."""
        if self._decided is not None:
            return self._decided
        now = self._clock()
        if self._present is not None and self._present[1]:
            self._took[self._present[0]].append(now - self._started)
        self._started = now
        if self._plan:
            self._present = self._plan.pop(0)
            return self._present[0]
        mine = [statistics.median(self._took[way]) for way in (False, True)]
        rows = peers.gather_small(
            torch.tensor(mine, dtype=torch.float64),
            channel="call",
            label="the choice between codes and plain gradients",
        )
        plain, coded = rows.max(dim=0).values.tolist()
        self._decided = coded < plain
        self.outcome = f"an update takes {coded:.3g} s with codes and {plain:.3g} s without"
        return self._decided
