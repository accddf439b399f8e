"""Keeps ranks on one order of gathers: never a hang, never garbage.

While an order is recorded, every gather is preceded by a tiny exchange of (segment, position, wish); different wishes
raise the same ``DivergenceError`` on all ranks before any data moves. A rank that follows an agreed order exchanges
nothing. A rank about to leave the order enters the exchange; if all ranks do so with the same wish, recording starts
again. If some do not, they and it wait for each other, which ``comm.watch.watchdog`` finds out.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DivergenceError

END_OF_SEGMENT = -1


class Agreement:
    """The view of one rank on the agreed order.

    Args:
        transport: Of the group that gathers.
        describe: Turns a bucket index into words for messages.
    """

    def __init__(self, transport: Transport, describe: Callable[[int], str]) -> None:
        self._transport = transport
        self._describe = describe
        self._segment = 0
        self._kind = "none"
        self._digest = 0

    @property
    def digest(self) -> int:
        """Checksum of everything issued so far; equal on all ranks that kept the order (below 2**32)."""
        return self._digest

    def begin_segment(self, kind: str) -> None:
        """Opens a segment: one outermost forward or one backward."""
        self._segment += 1
        self._kind = kind

    def end_segment(self, issued: Sequence[int]) -> None:
        """Adds what the segment issued to the digest."""
        self._digest = zlib.crc32(f"{self._kind}:{list(issued)}".encode(), self._digest)

    def exchange(self, position: int, request: int) -> None:
        """Compares the wishes of all ranks; all of them call it, while an order is recorded or when they leave one.

        Args:
            position: Gathers issued in this segment so far.
            request: Index of the wanted bucket, or ``END_OF_SEGMENT``.

        Raises:
            DivergenceError: The ranks want different things; raised on every rank.
        """
        if self._transport.size == 1:
            return
        mine = torch.tensor([self._segment, position, request], dtype=torch.int64)
        gathered = self._transport.gather_small(mine, channel="order", label=self._words(request))
        if not torch.equal(gathered, mine.expand_as(gathered)):
            rows = gathered.tolist()
            wishes = "; ".join(f"rank {rank}: {self._words(row[2])}" for rank, row in enumerate(rows))
            raise DivergenceError(
                f"ranks took different branches in the {self._kind} (segment {self._segment}, position {position}): "
                f"{wishes}. Under ZeRO stage 3 every rank must use the same modules in the same order. Make the branch "
                "depend on data that is equal on all ranks, or mark the module that holds both branches with "
                "deepspeed.utils.set_z3_leaf_modules so that it is gathered whole"
            )

    def _words(self, request: int) -> str:
        return f"the end of the {self._kind}" if request == END_OF_SEGMENT else self._describe(request)
