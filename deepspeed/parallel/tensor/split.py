"""How one dimension of a weight is divided among the ranks that share a layer. Pure arithmetic.

A dimension is a row of *runs*; each has equal *units* that stay whole (a head, a column), and every rank gets a
consecutive part of the units of each run. A plain linear layer is one run of single rows; query, key and value
packed in one weight are three; the halves of a gated MLP two.

Attention needs more than even parts: a query head must lie beside the key/value head that it uses. So heads are
assigned together (:class:`Heads`): key/value heads evenly, with their query heads; or, where there are fewer key/value
heads than ranks, each to several ranks that share out its query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

Interval = tuple[int, int]
"""First and last-plus-one index."""


def even(count: int, size: int, place: int) -> Interval:
    """Returns the part of ``count`` units that place ``place`` of ``size`` gets; the first places get one more."""
    each, more = divmod(count, size)
    low = place * each + min(place, more)
    return low, low + each + (place < more)


@dataclass(frozen=True)
class Heads:
    """The heads of one attention layer."""

    query: int  # query heads
    # Key/value heads; a divisor of ``query``. Query head *i* uses the one with the number ``i // (query //
    # key_value)``.
    key_value: int
    size: int  # ranks that share the layer

    @property
    def shared_by(self) -> int:
        """Query heads that use one key/value head."""
        return self.query // self.key_value

    def problem(self) -> str | None:
        """Returns why the heads cannot be divided, or None."""
        if self.query % self.key_value:
            return f"{self.query} query heads are not a multiple of {self.key_value} key/value heads"
        if self.size > self.query:
            return f"{self.query} query heads are fewer than the {self.size} ranks"
        if self.size > self.key_value and self.shared_by < -(-self.size // self.key_value):
            return (
                f"{self.key_value} key/value heads with {self.shared_by} query heads each cannot be divided "
                f"over {self.size} ranks"
            )
        return None

    def of_key_value(self, place: int) -> Interval:
        """Returns the key/value heads of a rank; at least one."""
        if self.size <= self.key_value:
            return even(self.key_value, self.size, place)
        head, _ = self._shared(place)
        return head, head + 1

    def of_query(self, place: int) -> Interval:
        """Returns the query heads of a rank."""
        if self.size <= self.key_value:
            low, high = even(self.key_value, self.size, place)
            return low * self.shared_by, high * self.shared_by
        head, (first, last) = self._shared(place)
        low, high = even(self.shared_by, last - first, place - first)
        return head * self.shared_by + low, head * self.shared_by + high

    def replicas(self, place: int) -> Interval:
        """Returns the ranks that have the same key/value heads; itself unless heads are fewer than ranks."""
        return (place, place + 1) if self.size <= self.key_value else self._shared(place)[1]

    def _shared(self, place: int) -> tuple[int, Interval]:
        """Returns the one key/value head of a rank, and all ranks that have it."""
        for head in range(self.key_value):
            first, last = even(self.size, self.key_value, head)
            if first <= place < last:
                return head, (first, last)
        raise AssertionError(f"no head for rank {place} of {self.size}")


class UnitAssignment(Enum):
    """Who gets the units of a run."""

    EVENLY = "evenly"
    AS_QUERIES = "as query heads"
    AS_KEYS = "as key/value heads"


@dataclass(frozen=True)
class UnitRun:
    """A run of equal units in a dimension."""

    start: int  # its first index
    units: int
    unit: int = 1  # indices of one
    assignment: UnitAssignment = UnitAssignment.EVENLY  # who gets them

    @property
    def stop(self) -> int:
        """One more than its last index."""
        return self.start + self.units * self.unit


@dataclass(frozen=True)
class Split:
    """How a dimension is divided among the ranks."""

    runs: tuple[UnitRun, ...]  # in order; together the whole dimension
    size: int  # ranks that share the layer
    heads: Heads | None = None  # for runs that are divided as heads are

    @classmethod
    def evenly(cls, extent: int, size: int, grain: int = 1, parts: int = 1) -> Split:
        """Returns even parts of a dimension, or of each of several packed tensors (``parts``) of equal extent.

        ``grain`` indices stay together; what is left over goes to the last rank that has any.
        """
        each = extent // parts
        if each % grain:
            grain = 1
        return cls(tuple(UnitRun(part * each, each // grain, grain) for part in range(parts)), size)

    @property
    def extent(self) -> int:
        """Size of the whole dimension."""
        return self.runs[-1].stop

    def intervals(self, place: int) -> list[Interval]:
        """Returns the ranges of the dimension that a rank has, in order; adjacent ones joined, empty ones left out."""
        intervals: list[Interval] = []
        for run in self.runs:
            low, high = self._units(run, place)
            start, stop = run.start + low * run.unit, run.start + high * run.unit
            if start == stop:
                continue
            if intervals and intervals[-1][1] == start:
                intervals[-1] = intervals[-1][0], stop
            else:
                intervals.append((start, stop))
        return intervals

    def width(self, place: int) -> int:
        """Returns how many indices a rank has."""
        return sum(stop - start for start, stop in self.intervals(place))

    def replicas(self, place: int) -> Interval:
        """Returns the ranks that have exactly what this one has."""
        alone = (place, place + 1)
        if self.heads is None or any(run.assignment is not UnitAssignment.AS_KEYS for run in self.runs):
            return alone
        return self.heads.replicas(place)

    def shares_a_part(self) -> bool:
        """Returns whether some run, but not all, is held by several ranks: such a tensor is neither cut nor whole."""
        kinds = {run.assignment for run in self.runs}
        shared = self.heads is not None and self.heads.size > self.heads.key_value
        return shared and UnitAssignment.AS_KEYS in kinds and len(kinds) > 1

    def ranks_without_units(self) -> list[int]:
        """Returns the ranks that would have nothing."""
        return [place for place in range(self.size) if self.width(place) == 0]

    def _units(self, run: UnitRun, place: int) -> Interval:
        if run.assignment is UnitAssignment.EVENLY:
            return even(run.units, self.size, place)
        assert self.heads is not None
        if run.assignment is UnitAssignment.AS_KEYS:
            return self.heads.of_key_value(place)
        return self.heads.of_query(place)


def widths(split: Split) -> Sequence[int]:
    """Returns how many indices each rank has."""
    return [split.width(place) for place in range(split.size)]
