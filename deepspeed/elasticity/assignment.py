"""Which rank computes which micro-batches of an update, whatever the number of ranks."""

from __future__ import annotations

from typing import NamedTuple


class AssignedMicroBatch(NamedTuple):
    """One micro-batch of a rank.

    Attributes:
        number: Which of the update's micro-batches.
        counts: False: it fills a round in which other ranks have one more; its loss counts nothing.
    """

    number: int
    counts: bool


def assign_micro_batches(micro_batches: int, ranks: int, rank: int) -> list[AssignedMicroBatch]:
    """Returns the micro-batches of a rank: consecutive ones, equally many in number on all ranks.

    Every rank runs as many backwards, since at stages 2 and 3 all ranks take part in each. Where the update has no
    multiple of the ranks, some run one again that counts nothing.

    Args:
        micro_batches: Of the update, over all ranks.
        ranks: How many there are.
        rank: Which of them.
    """
    each, more = divmod(micro_batches, ranks)
    start = rank * each + min(rank, more)
    own = [AssignedMicroBatch(number, True) for number in range(start, start + each + (rank < more))]
    rounds = each + (more > 0)
    return own + [AssignedMicroBatch(start % micro_batches, False)] * (rounds - len(own))
