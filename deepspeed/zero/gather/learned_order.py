"""An order of gathers that passes may follow which leave some buckets out, all ranks the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet


class LearnedOrder:
    """What recorded passes have shown of the order of one situation.

    A pass that leaves buckets out shows the rest of the order. From several such passes the whole order is put
    together; where they do not tell which of two buckets comes first, the numbers of the buckets do. That may be
    wrong, which only makes a gather early: a rank passes over what it does not want now.

    Attributes:
        order: Numbers of buckets, in the order of their gathers; a bucket may come more than once.
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self._unseen: frozenset[int] | None = None  # left out by every pass so far; None before the first

    def without(self, skipped: AbstractSet[int]) -> list[int] | None:
        """Returns the order of a pass that leaves ``skipped`` out; None if it may need what no pass has shown yet."""
        if self._unseen is None or not self._unseen <= skipped:
            return None
        return [index for index in self.order if index not in skipped]

    def learn(self, order: Sequence[int], skipped: AbstractSet[int], *, falls: bool) -> None:
        """Takes in a recorded pass.

        Args:
            order: What it gathered.
            skipped: What it left out.
            falls: Whether bucket numbers fall along the order, as in a backward.
        """
        known, merged = self.order, list(order)
        for position, index in enumerate(known):
            if index in skipped and index not in merged:
                merged.insert(_place(index, known[:position], known, merged, falls=falls), index)
        self.order = merged
        self._unseen = frozenset(skipped) if self._unseen is None else self._unseen & skipped


def _place(index: int, before: Sequence[int], known: Sequence[int], merged: Sequence[int], *, falls: bool) -> int:
    """Where ``index`` comes: behind the last of those it followed, and behind new ones whose number comes first."""
    place = max((merged.index(other) + 1 for other in before if other in merged), default=0)
    while place < len(merged) and merged[place] not in known and (merged[place] > index) == falls:
        place += 1
    return place
