"""Elements that are gathered or on their way, counted as buckets change their state."""

from __future__ import annotations

from collections import OrderedDict

from deepspeed.zero.address import State


class GatherCount:
    """Counts the elements of sharded buckets. Every change costs the same, however many buckets there are.

    Attributes:
        live: Elements of buckets that are gathered or on their way.
        arriving: Elements of each bucket that is on its way, by the index of the bucket, oldest first.
        arriving_numel: Their sum.
    """

    def __init__(self) -> None:
        self.live = 0
        self.arriving: OrderedDict[int, int] = OrderedDict()
        self.arriving_numel = 0

    def change(self, index: int, numel: int, before: State, after: State) -> None:
        """Notes that a bucket changes its state.

        Args:
            index: Of the bucket.
            numel: Elements of it.
            before: Its state until now.
            after: Its state from now on.
        """
        if before is State.GATHERING:
            self.arriving_numel -= self.arriving.pop(index)
        if after is State.GATHERING:
            self.arriving[index] = numel
            self.arriving_numel += numel
        self.live += numel * ((after is not State.SHARDED) - (before is not State.SHARDED))
