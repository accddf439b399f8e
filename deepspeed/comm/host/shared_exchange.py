"""Exchanges and sums among ranks of one host, through memory that they share (``comm.host.shared_memory``).

In an exchange each element is written once by its sender and read once by its receiver, directly from and to the
tensors: parts that are cut out of a tensor, or assembled into one, need no further copy.

For a sum, gloo's threads read summands from sockets. Here a rank writes its summand into shared memory and reads the
others' from there. A layer can compute into that memory, and then nothing is copied.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from deepspeed.axes import DATA
from deepspeed.comm.base.counters import traffic
from deepspeed.comm.base.recorder import timed
from deepspeed.comm.host.gloo import GlooTransport
from deepspeed.comm.host.shared_memory import LONGEST_WORDS, MOST, HostPeer, RoundMessage, SameHost, join_same_host
from deepspeed.comm.transports import packing
from deepspeed.comm.transports.packing import Tensors, numel_of
from deepspeed.comm.transports.transport import Transport, Work


class SameHostTransport(GlooTransport):
    """Gloo, except that ranks of one host exchange through shared memory. They connect in their first exchange."""

    def __init__(self, group: Any, rank: int, size: int, axis: str = DATA) -> None:
        super().__init__(group, rank, size, axis)
        self._host: SameHost | None = None
        self._has_met = False
        self._offered: torch.Tensor | None = None

    def _met(self, label: str) -> SameHost | None:
        if not self._has_met:
            self._host = join_same_host(self, label)
            self._has_met = True
        return self._host

    @override
    def leave(self) -> None:
        super().leave()
        self._host, self._has_met, self._offered = None, False, None

    @override
    def staging_buffer(self, numel: int, like: torch.Tensor, *, label: str) -> torch.Tensor:
        host = self._met(label)
        if host is None or numel * like.element_size() > MOST:
            return super().staging_buffer(numel, like, label=label)
        self._offered = host.place(numel, like.dtype, label)
        return self._offered

    @override
    def all_to_all(
        self, source: torch.Tensor, sent: Sequence[int], out: torch.Tensor, received: Sequence[int], *, label: str
    ) -> Work:
        if self._met(label) is None:
            return super().all_to_all(source, sent, out, received, label=label)
        leaving, arriving = source.split(list(sent)), out.split(list(received))
        return self.exchange([[part] for part in leaving], [[part] for part in arriving], out, label=label)

    @override
    def exchange(
        self, leaving: Sequence[Tensors], arriving: Sequence[Tensors], like: torch.Tensor, *, label: str
    ) -> Work:
        offered, self._offered = self._offered, None
        host = self._met(label)
        if host is None:
            return super().exchange(leaving, arriving, like, label=label)
        with torch.no_grad():
            return self._exchanged(leaving, arriving, like, host, offered, label)

    @timed("all_to_all_single")
    def _exchanged(
        self,
        leaving: Sequence[Tensors],
        arriving: Sequence[Tensors],
        like: torch.Tensor,
        host: SameHost,
        offered: torch.Tensor | None,
        label: str,
    ) -> Work:
        key = self.next_move(label)
        ticket = self.issue("all_to_all", key)
        size, dtype = like.element_size(), like.dtype
        numels = [0 if rank == self.rank else numel_of(part) for rank, part in enumerate(leaving)]
        nbytes = [numel * size for numel in numels]
        expected = [0 if rank == self.rank else numel_of(part) * size for rank, part in enumerate(arriving)]
        traffic.record_requested("all_to_all", sum(nbytes), self.axis)
        by_gloo: list[_ByGloo] = []
        if max(nbytes) > MOST or max(expected) > MOST:
            by_gloo = [
                _ByGloo(self, peer.rank, key, leaving[peer.rank], arriving[peer.rank], like) for peer in host.peers
            ]
            numels = [numel if numel * size <= MOST else 0 for numel in numels]
            expected = [each if each <= MOST else 0 for each in expected]
        flat = [tensor for part in leaving for tensor in part]
        is_written = False  # whether the caller has written all of it into the memory that was offered
        if offered is not None:
            source, extent = packing.in_place(flat, offered.dtype), (offered.numel(), offered.data_ptr())
            is_written = offered.numel() == 0 if source is None else (source.numel(), source.data_ptr()) == extent
        if offered is None or not is_written:
            offered = host.place(sum(numels), dtype, label)
            for part, place in zip(leaving, offered.split(numels), strict=True):
                if place.numel():
                    packing.write(part, place)
        words, start = _words(label, dtype), 0
        messages = {}
        for rank, numel in enumerate(numels):
            messages[rank] = RoundMessage(start, numel * size, words)
            start += numel * size
            if numel:
                traffic.record_ran("send", numel * size, self.axis)
        senders = [peer for peer in host.peers if expected[peer.rank]]
        made = _Exchange(host, senders, arriving, expected, words, dtype, label, ticket, by_gloo)
        host.begin(made, [messages[peer.rank] for peer in host.peers])
        packing.copy(leaving[self.rank], arriving[self.rank])
        return made


class _Exchange:
    """An exchange in flight."""

    def __init__(
        self,
        host: SameHost,
        senders: list[HostPeer],
        arriving: Sequence[Tensors],
        expected: list[int],
        words: bytes,
        dtype: torch.dtype,
        label: str,
        ticket: tuple[str, int],
        by_gloo: list[_ByGloo],
    ) -> None:
        self.number = host.next_number()  # the number of the round
        self._senders, self._arriving, self._expected = senders, arriving, expected
        self._words, self._dtype, self._label, self._ticket = words, dtype, label, ticket
        self._by_gloo = by_gloo
        self._host: SameHost | None = host

    def will_arrive(self) -> bool:
        """Returns whether all peers are known to have sent their part, so that waiting needs no further call."""
        return self._host is None

    def wait(self) -> None:
        """Blocks (host or current stream) until the result is in place. Later calls return at once."""
        host = self._host
        if host is None:
            return
        host.wait_for(self._senders, self.number, self._label, self._ticket)
        for peer in self._senders:
            round_message = peer.round_message(self.number)
            if round_message.words != self._words or round_message.nbytes != self._expected[peer.rank]:
                raise self._parted(host, peer)
        with torch.no_grad():
            for peer in self._senders:
                packing.read(peer.wrote(self.number, self._dtype), self._arriving[peer.rank])
            host.has_read(self.number)
            for part in self._by_gloo:
                part.finish(self._ticket, self._label)
        self._host = None
        self._arriving, self._by_gloo = (), []

    def _parted(self, host: SameHost, peer: HostPeer) -> Exception:
        mine = self._words.decode()
        theirs = peer.round_message(self.number)
        if theirs.words == self._words:
            mine += f", and expects {self._expected[peer.rank]} bytes of it where {theirs.nbytes} come"
        return host.parted(self.number, peer, mine, "exchanges")


class _ByGloo:
    """Exchanges with one rank by gloo, if one direction is too large for shared memory."""

    def __init__(
        self, transport: GlooTransport, peer: int, key: int, leaving: Tensors, arriving: Tensors, like: torch.Tensor
    ) -> None:
        self._transport = transport
        self._works: list[Any] = []
        self._arriving: Tensors = ()
        self._flat = like.new_empty(0)
        if numel_of(arriving) * like.element_size() > MOST:
            self._arriving, self._flat = arriving, like.new_empty(numel_of(arriving))
            self._works.append(transport.receive(self._flat, peer, key))
        if numel_of(leaving) * like.element_size() > MOST:
            source = packing.in_place(leaving, like.dtype)
            if source is None:
                source = like.new_empty(numel_of(leaving))
                packing.write(leaving, source)
            self._works.append(transport.send(source, peer, key))
            self._keep = source

    def finish(self, ticket: tuple[str, int], label: str) -> None:
        """Waits for both."""
        if self._works:
            self._transport.progress_pending()
            self._transport.guard_all(self._works, ticket, label)
        if self._arriving:
            packing.read(self._flat, self._arriving)


@functools.lru_cache(maxsize=4096)
def _words(label: str, dtype: torch.dtype) -> bytes:
    return f"{label} ({dtype})".encode()[:LONGEST_WORDS]


class SharedMemorySumBackend:
    """Sums tensors over the ranks of one host. All ranks must start the same sums in the same order."""

    def __init__(self, host: SameHost) -> None:
        self._host = host
        self._offered: torch.Tensor | None = None

    def serves(self, numel: int, dtype: torch.dtype) -> bool:
        """Returns whether a summand of ``numel`` elements is summed here; the same on all ranks."""
        return numel * dtype.itemsize <= MOST

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns memory for the summand of the next sum; it is valid for the next :meth:`start` only."""
        self._offered = self._host.place(math.prod(shape), dtype, "free space for a sum").view(shape)
        return self._offered

    def start(self, values: torch.Tensor, label: str) -> _SharedSum:
        """Starts a sum of ``values`` (contiguous, any shape) over the ranks of this host.

        They are what :meth:`place` returned, or any other tensor, which receives the result.
        """
        mine, out, self._offered = self._offered, None, None
        if mine is None or mine.data_ptr() != values.data_ptr():
            mine, out = self.place(values.shape, values.dtype).copy_(values), values
            self._offered = None
        nbytes = mine.numel() * mine.element_size()
        transport = self._host.transport
        traffic.record_requested("all_reduce", 2 * nbytes, transport.axis)
        traffic.record_ran("all_reduce", 2 * nbytes, transport.axis)  # counted as the backend's, as a plan does
        words = _sum_words(label, mine.numel(), mine.dtype)
        made = _SharedSum(self._host, mine, out, label, words)
        self._host.begin(made, [RoundMessage(0, nbytes, words)] * len(self._host.peers))
        return made

    def close(self) -> None:
        """Makes waits for this rank raise, on other ranks and on this one."""
        self._host.close()


class _SharedSum:
    """A sum in flight."""

    def __init__(self, host: SameHost, mine: torch.Tensor, out: torch.Tensor | None, label: str, words: bytes) -> None:
        self.number = host.next_number()  # the number of the sum
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
def _sum_words(label: str, numel: int, dtype: torch.dtype) -> bytes:
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
    host = join_same_host(transport, "finding the ranks of one host")
    return None if host is None else SharedMemorySumBackend(host)
