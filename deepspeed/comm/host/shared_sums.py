"""Sums among ranks of one host, through memory that they share (``comm.host.shared_memory``).

Gloo adds up what threads of its own have read from sockets. Here a rank leaves its summand where the others see it and
adds up what it finds with them. A layer can compute into that memory, and then nothing is copied at all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from deepspeed.comm.host.shared_memory import LONGEST_WORDS, MOST, RoundMessage, SameHost, meet_on_host
from deepspeed.comm.transports.counters import traffic
from deepspeed.comm.transports.transport import Transport


class SharedMemorySumBackend:
    """Sums over ranks of one host. All of them must begin the same sums, in one order.

    Args:
        host: These ranks.
    """

    def __init__(self, host: SameHost) -> None:
        self._host = host
        self._offered: torch.Tensor | None = None

    def serves(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether a summand of ``numel`` elements is summed here; the same on all ranks."""
        return numel * dtype.itemsize <= MOST

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Where the summand of the next sum may be written; it is good for the next :meth:`start` only."""
        self._offered = self._host.place(math.prod(shape), dtype, "room for a sum").view(shape)
        return self._offered

    def start(self, values: torch.Tensor, label: str) -> _SharedSum:
        """Starts a sum over the ranks of this host.

        Args:
            values: Contiguous, any shape: what :meth:`place` returned, or any other tensor, which receives the result.
            label: What travels, for messages about ranks that do not come.
        """
        mine, out, self._offered = self._offered, None, None
        if mine is None or mine.data_ptr() != values.data_ptr():
            mine, out = self.place(values.shape, values.dtype).copy_(values), values
            self._offered = None
        nbytes = mine.numel() * mine.element_size()
        transport = self._host.transport
        traffic.record_asked("all_reduce", 2 * nbytes, transport.axis)
        traffic.record_ran("all_reduce", 2 * nbytes, transport.axis)  # as the backend, which a plan counts
        words = _words(label, mine.numel(), mine.dtype)
        made = _SharedSum(self._host, mine, out, label, words)
        self._host.begin(made, [RoundMessage(0, nbytes, words)] * len(self._host.peers))
        return made

    def close(self) -> None:
        """Makes whoever waits for this rank, or in it, raise."""
        self._host.close()


class _SharedSum:
    """A sum on its way.

    Attributes:
        number: Of the sum.
    """

    def __init__(self, host: SameHost, mine: torch.Tensor, out: torch.Tensor | None, label: str, words: bytes) -> None:
        self.number = host.next_number()
        self._mine, self._out, self._label, self._words = mine, out, label, words
        self._ticket = host.transport.issue("sum")
        self._host: SameHost | None = host
        self._result = mine

    def wait(self) -> torch.Tensor:
        """Returns the sum: shaped like the summand, no view of another tensor. May be called again."""
        if self._host is not None:
            self._result = self._added(self._host)
            self._host = None
        return self._result

    def _added(self, host: SameHost) -> torch.Tensor:
        """Waits for the other summands and adds them, in the order of the ranks."""
        host.wait_for(host.peers, self.number, self._label, self._ticket)
        for peer in host.peers:
            if peer.round_message(self.number).words != self._words:
                raise host.parted(self.number, peer, self._words.decode(), "sums")
        host.has_read(self.number)
        summands = {host.transport.rank: self._mine}
        for peer in host.peers:
            summands[peer.rank] = peer.wrote(self.number, self._mine.dtype).view(self._mine.shape)
        return _added([summands[rank] for rank in range(len(summands))], self._out)


@functools.lru_cache(maxsize=4096)
def _words(label: str, numel: int, dtype: torch.dtype) -> bytes:
    return f"{label} ({numel} elements of {dtype})".encode()[:LONGEST_WORDS]


def _added(parts: list[torch.Tensor], out: torch.Tensor | None) -> torch.Tensor:
    if len(parts) == 2:
        return torch.add(*parts, out=torch.empty_like(parts[0]) if out is None else out)
    wide = parts[0].dtype if parts[0].dtype.itemsize > 2 else torch.float32
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(parts[0].dtype) if out is None else out.copy_(total)


def same_host_sums(transport: Transport) -> SharedMemorySumBackend | None:
    """Sums over the ranks of ``transport``; None where they are not all on one host, or have another backend.

    Every rank of ``transport`` must call it, at the same time.
    """
    host = meet_on_host(transport, "finding the ranks of one host")
    return None if host is None else SharedMemorySumBackend(host)
