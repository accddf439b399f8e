"""Checks that all ranks gather in the same order, so that they raise instead of hanging or mixing up data.

While an order is recorded, every gather is preceded by a tiny exchange of (pass, position, wish). A rank that follows
an agreed order exchanges nothing. A rank about to leave the order enters the exchange; if all ranks do so with the same
wish, recording starts again. If only some do, the ranks wait for each other, which ``comm.watch.watchdog`` detects.

Different wishes raise the same ``DivergenceError`` on all ranks before any data moves, or are *served*: all ranks take
part in the gathers of all wishes. An agreement that *adapts* serves from the first exchange on in which wishes differ;
so that a part of the model that no rank used while the order was recorded does not end in an error when some ranks use
it later, forwards whose order leaves parameters out have one exchange, at their end.

Where different wishes are served, there are two more exchanges per pass: at its start the ranks compare their records
of it, and at its end they exchange requests until there are none. Each exchange contains the requests of all ranks, and
all take part in the gathers. A rank that runs more evaluations than the others is helped: where another one starts a
training pass, that rank first takes part in the evaluation.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import Enum

import torch

from deepspeed.comm.transports.transport import Transport
from deepspeed.comm.watch.wait_records import with_advice
from deepspeed.errors import DivergenceError
from deepspeed.logging import log_dist
from deepspeed.zero.passes import ModelPhase

END_OF_PASS = -1

_SAME_NUMBER = (
    'zero_optimization.agreement "serve" lets ranks use different modules, but every rank must run the same number of '
    "forwards and backwards, in the same order. Only evaluations may be more on one rank than on another, if the next "
    "call of the others is a forward of the same engine. Where ranks generate to unequal lengths, pass "
    "synced_gpus=True to generate(), or let every rank run as many forwards as the longest one"
)


class PassMode(Enum):
    """What a rank does after all have compared their records of a pass."""

    FOLLOW = "follow"
    RECORD = "record"
    HELP = "help"


class Agreement:
    """One rank's side of the agreed order.

    Args:
        serves: Different wishes are no error (``zero_optimization.agreement``); see :meth:`collect`.
        adapts: ``serves`` is set when wishes differ in an exchange, on all ranks alike.
    """

    def __init__(
        self,
        transport: Transport,
        labels: Sequence[str],
        *,
        name: str = "the model",
        serves: bool = False,
        adapts: bool = False,
    ) -> None:
        self._transport = transport
        self._labels = labels  # of the buckets, for messages
        self._name = name
        self.serves = serves  # see the argument
        self.adapts = adapts
        self._pass = 0
        self._phase = ModelPhase.IDLE
        self._digest = 0

    @property
    def digest(self) -> int:
        """Checksum of everything issued so far; equal on all ranks that kept the order (below 2**32)."""
        return self._digest

    def begin_pass(self, phase: ModelPhase) -> None:
        """Opens a pass: one outermost forward or one backward."""
        self._pass += 1
        self._phase = phase

    def end_pass(self, issued: Sequence[int]) -> None:
        """Adds what the pass issued to the digest."""
        self._digest = zlib.crc32(f"{self._phase.value}:{list(issued)}".encode(), self._digest)

    def end_help(self, issued: Sequence[int]) -> None:
        """Counts the open pass as an evaluation that other ranks ran, and begins it again under the next number."""
        phase, self._phase = self._phase, ModelPhase.EVALUATION
        self.end_pass(issued)
        self.begin_pass(phase)

    def compare(self, knowledge: int) -> PassMode:
        """Compares the records of all ranks at the start of the open pass. All of them call it.

        Returns:
            Whether this rank follows its record, records the pass, or takes part in an evaluation of other ranks first
            and then calls it again.

        Raises:
            DivergenceError: The ranks are in different passes; raised on every rank.
        """
        phase = self._phase.value
        own_kind, evaluation = zlib.crc32(phase.encode()), zlib.crc32(ModelPhase.EVALUATION.value.encode())
        start = f"the start of the {phase} of {self._name} (engine {self._transport.owner})"
        rows = self._gather([self._pass, own_kind, knowledge], with_advice(start, _SAME_NUMBER))
        kinds = {row[1] for row in rows}
        if any(row[0] != self._pass for row in rows) or (len(kinds) > 1 and evaluation not in kinds):
            raise DivergenceError(
                f"ranks ran different passes of {self._name}: this one is in a {phase} (pass {self._pass}), the "
                f"passes of all ranks are {[row[0] for row in rows]}. {_SAME_NUMBER}"
            )
        if len(kinds) > 1 and own_kind != evaluation:
            return PassMode.HELP
        return PassMode.FOLLOW if all(row == rows[0] for row in rows) else PassMode.RECORD

    def collect(self, position: int, request: int, *, in_pass: bool = True) -> list[int]:
        """Returns the buckets that the ranks want now, each once, in order; empty when all ranks have reached the end.

        All ranks call it while an order is recorded or when they leave one. Where wishes are served they call it until
        it returns none, also ranks that have reached the end, since they take part in the gathers.

        Args:
            request: Index of the wanted bucket, or ``END_OF_PASS``.
            in_pass: Whether a pass is open; outside, different wishes are never served.

        Raises:
            DivergenceError: The ranks want different things, which are not served, or have issued different gathers;
                raised on every rank.
        """
        words = self._words(request)
        rows = self._gather([self._pass, position, request], with_advice(words, _SAME_NUMBER) if self.serves else words)
        is_aligned = all(row[:2] == rows[0][:2] for row in rows)
        if self.serves and not is_aligned:
            raise DivergenceError(
                f"ranks have issued different gathers in the {self._phase.value}: pass and number by rank are "
                f"{[row[:2] for row in rows]}. {_SAME_NUMBER}"
            )
        phase = self._phase.value
        if not self.serves and any(row != rows[0] for row in rows):
            wishes = "; ".join(f"rank {rank}: {self._words(row[2])}" for rank, row in enumerate(rows))
            if not (self.adapts and is_aligned and in_pass):
                raise DivergenceError(
                    f"ranks took different branches in the {phase} (pass {self._pass}, position {position}): "
                    f"{wishes}. Under ZeRO stage 3 every rank must use the same modules in the same order. "
                    'Set zero_optimization.agreement to "serve", mark the module that holds both branches with '
                    "deepspeed.utils.set_z3_leaf_modules so that it is gathered whole, or make the "
                    "branch depend on data that is equal on all ranks"
                )
            self.serves = True
            log_dist(
                f"ranks use different modules in the {phase}: {wishes}. From now on all ranks gather what any of "
                "them needs, which costs two more exchanges in each forward and backward. zero_optimization.agreement "
                '"serve" does so from the start, and "error" makes it an error'
            )
        return sorted({row[2] for row in rows} - {END_OF_PASS})

    def _gather(self, row: list[int], label: str) -> list[list[int]]:
        if self._transport.size == 1:
            return [row]
        own_row = torch.tensor(row, dtype=torch.int64)
        rows: list[list[int]] = self._transport.gather_small(own_row, channel="order", label=label).tolist()
        return rows

    def _words(self, request: int) -> str:
        return f"the end of the {self._phase.value}" if request == END_OF_PASS else self._labels[request]
