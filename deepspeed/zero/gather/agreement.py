"""Checks that all ranks gather in the same order, so that they raise instead of hanging or mixing up data.

While an order is recorded, every gather is preceded by a tiny exchange of (pass, position, wish); different wishes
raise the same ``DivergenceError`` on all ranks before any data moves. A rank that follows an agreed order exchanges
nothing. A rank about to leave the order enters the exchange; if all ranks do so with the same wish, recording starts
again. If only some do, the ranks wait for each other, which ``comm.watch.watchdog`` detects.

Where different wishes are *served*, there are two more exchanges per pass: at its start the ranks compare their
records of it, and at its end they exchange requests until there are none. Each exchange contains the requests of all
ranks, and all take part in the gathers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DivergenceError

END_OF_PASS = -1


class Agreement:
    """One rank's side of the agreed order.

    Args:
        transport: The transport of the group that gathers.
        describe: Describes a bucket, given its index, for messages.
        serves: Different wishes are no error (``zero_optimization.agreement``); see :meth:`collect`.

    Attributes:
        serves: See the argument.
    """

    def __init__(self, transport: Transport, describe: Callable[[int], str], *, serves: bool = False) -> None:
        self._transport = transport
        self._describe = describe
        self.serves = serves
        self._pass = 0
        self._kind = "none"
        self._digest = 0

    @property
    def digest(self) -> int:
        """Checksum of everything issued so far; equal on all ranks that kept the order (below 2**32)."""
        return self._digest

    def begin_pass(self, kind: str) -> None:
        """Opens a pass: one outermost forward or one backward."""
        self._pass += 1
        self._kind = kind

    def end_pass(self, issued: Sequence[int]) -> None:
        """Adds what the pass issued to the digest."""
        self._digest = zlib.crc32(f"{self._kind}:{list(issued)}".encode(), self._digest)

    def exchange(self, position: int, request: int) -> None:
        """Compares the wishes of all ranks. All call it, while an order is recorded or when they leave one.

        Args:
            position: Gathers issued in this pass so far.
            request: Index of the wanted bucket, or ``END_OF_PASS``.

        Raises:
            DivergenceError: The ranks want different things; raised on every rank.
        """
        if self._transport.size == 1:
            return
        mine = torch.tensor([self._pass, position, request], dtype=torch.int64)
        gathered = self._transport.gather_small(mine, channel="order", label=self._words(request))
        if not torch.equal(gathered, mine.expand_as(gathered)):
            rows = gathered.tolist()
            wishes = "; ".join(f"rank {rank}: {self._words(row[2])}" for rank, row in enumerate(rows))
            raise DivergenceError(
                f"ranks took different branches in the {self._kind} (pass {self._pass}, position {position}): "
                f"{wishes}. Under ZeRO stage 3 every rank must use the same modules in the same order. Make the branch "
                "depend on data that is equal on all ranks, mark the module that holds both branches with "
                "deepspeed.utils.set_z3_leaf_modules so that it is gathered whole, or set zero_optimization.agreement "
                'to "serve"'
            )

    def is_alike(self, knowledge: int) -> bool:
        """Returns whether all ranks begin the open pass with equal records. All of them call it, once.

        Args:
            knowledge: Checksum of this rank's records (below 2**32).

        Raises:
            DivergenceError: The ranks are in different passes; raised on every rank.
        """
        rows = self._gather([self._pass, zlib.crc32(self._kind.encode()), knowledge], f"the {self._kind}")
        if any(row[:2] != rows[0][:2] for row in rows):
            raise DivergenceError(
                f"ranks ran different passes: this one is in a {self._kind} (pass {self._pass}), the "
                f'passes of all ranks are {[row[0] for row in rows]}. zero_optimization.agreement "serve" '
                "lets ranks use different modules, but every rank must run the same number of forwards and "
                "backwards, in the same order"
            )
        return all(row == rows[0] for row in rows)

    def collect(self, position: int, request: int) -> list[int]:
        """Returns the buckets that the ranks want now, each once, in order; empty when all ranks have reached the end.

        All ranks call it until it returns none: also ranks that have reached the end, since they take part in the
        gathers.

        Args:
            position: Gathers issued in this pass so far.
            request: Index of the wanted bucket, or ``END_OF_PASS``.

        Raises:
            DivergenceError: The ranks have issued different gathers; raised on every rank.
        """
        rows = self._gather([self._pass, position, request], self._words(request))
        if any(row[:2] != rows[0][:2] for row in rows):
            raise DivergenceError(
                f"ranks have issued different gathers in the {self._kind}: pass and number by rank are "
                f"{[row[:2] for row in rows]}. Every rank must run the same number of forwards and backwards"
            )
        return sorted({request for _, _, request in rows} - {END_OF_PASS})

    def _gather(self, row: list[int], label: str) -> list[list[int]]:
        if self._transport.size == 1:
            return [row]
        mine = torch.tensor(row, dtype=torch.int64)
        found: list[list[int]] = self._transport.gather_small(mine, channel="order", label=label).tolist()
        return found

    def _words(self, request: int) -> str:
        return f"the end of the {self._kind}" if request == END_OF_PASS else self._describe(request)
