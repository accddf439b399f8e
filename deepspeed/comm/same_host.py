"""Sums among ranks of one host, through memory that they share.

Gloo sends what it sums through sockets, and threads of its own add it up: on a host whose cores compute, that is time
taken from them. Here a rank leaves its summand in memory that the others see, says so in one short message, and adds up
what it finds with them. A layer can compute into that memory, and then nothing is copied at all.

A rank has :data:`_PLACES` places, used in turn. One may be written again when every other rank has read it, which their
messages say. They also say what a sum is of, so that sums of different things are an error and not a tensor. The memory
and the sockets have no names in any file system, so nothing is left behind by a process that is killed, and the sockets
of one that ends wake those that wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
import os
import secrets
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from deepspeed.comm.counters import traffic
from deepspeed.comm.gloo import GlooTransport
from deepspeed.comm.objects import gather_objects
from deepspeed.comm.relay import catch_up
from deepspeed.comm.transport import Transport
from deepspeed.comm.world import stand_in
from deepspeed.errors import DivergenceError

_PLACES = 2
_MOST = 64 * 2**20  # bytes of the largest summand; larger ones are the backend's, as the memory is kept
_GRAIN = 2**20  # bytes by which places grow
_MESSAGE = struct.Struct("=qq")  # sums that the sender has begun, and sums of which it has read all
_LONGEST = 512  # bytes of a message, which ends with what the last sum is of
_PATIENCE = timedelta(minutes=30)  # torch's own for gloo
_MEETING = 10.0  # seconds in which ranks of one host must find each other


class _Place:
    """Memory for one summand: written by its owner, read by the others.

    Args:
        file: Descriptor of memory that the ranks share; the owner's grows, in all others' eyes too.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._view = self._bytes
        weakref.finalize(self, os.close, file)

    def of(self, numel: int, dtype: torch.dtype, *, is_mine: bool) -> torch.Tensor:
        """A summand, 1-D, where it lies."""
        if self._view.dtype == dtype and self._view.numel() == numel:
            return self._view
        nbytes = numel * dtype.itemsize
        if nbytes > self._bytes.numel():
            length = -(-nbytes // _GRAIN) * _GRAIN
            if is_mine:
                os.ftruncate(self._file, length)
            self._bytes = torch.frombuffer(mmap.mmap(self._file, length), dtype=torch.uint8)
        self._view = self._bytes[:nbytes].view(dtype)
        return self._view


class _Peer:
    """Another rank, as this one knows it.

    Attributes:
        rank: Its place in the group.
        places: Where its summands lie.
        begun: Sums that it has begun.
        read: Sums of which it has read all summands.
        words: What its latest sums are of.
    """

    def __init__(self, rank: int, connection: socket.socket, files: list[int]) -> None:
        self.rank = rank
        self.connection = connection
        self.places = [_Place(file) for file in files]
        self.begun = self.read = 0
        self.words = [b""] * _PLACES

    def tell(self, message: bytes) -> None:
        """Says how far this rank is. One that has gone may have begun all that was wanted of it: the wait will show."""
        with contextlib.suppress(ConnectionError):
            self.connection.send(message)

    def hear(self) -> None:
        """Waits for its next message."""
        try:
            try:
                message = self.connection.recv(_LONGEST)
            except ConnectionResetError:  # it left without reading all; said once, and then comes what it had sent
                message = self.connection.recv(_LONGEST)
        except OSError as error:
            raise RuntimeError(f"nothing came from rank {self.rank} of the group ({error})") from error
        if not message:
            raise RuntimeError(f"rank {self.rank} of the group has closed its connection")
        self.begun, self.read = _MESSAGE.unpack_from(message)
        self.words[self.begun % _PLACES] = message[_MESSAGE.size :]


class SameHostSums:
    """Sums over ranks of one host. All of them must begin the same sums, in one order.

    Args:
        transport: Over these ranks; its watch sees the waits.
        files: Descriptors of this rank's places.
        peers: The others.
    """

    def __init__(self, transport: Transport, files: list[int], peers: list[_Peer]) -> None:
        self._transport = transport
        self._places = [_Place(file) for file in files]
        self._peers = peers
        self._begun = 0
        self._unfinished: list[_Sum | None] = [None] * _PLACES
        self._offered: torch.Tensor | None = None
        self._words = b""
        self._is_closed = False
        if transport.watch is not None:
            mine = weakref.ref(self)
            transport.watch.aborts[id(self)] = lambda: _abort(mine)
            weakref.finalize(self, transport.watch.aborts.pop, id(self), None)

    def serves(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether a summand of ``numel`` elements is summed here; the same on all ranks."""
        return numel * dtype.itemsize <= _MOST

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Where the summand of the next sum may be written; it is good for the next :meth:`start` only."""
        number = self._begun + 1
        earlier = self._unfinished[number % _PLACES]
        if earlier is not None:
            earlier.wait()
        wanted = number - _PLACES
        if any(peer.read < wanted for peer in self._peers):
            self._guard(lambda: self._wait_for_readers(wanted), "room for a sum", None)
        self._offered = self._places[number % _PLACES].of(math.prod(shape), dtype, is_mine=True).view(shape)
        return self._offered

    def start(self, values: torch.Tensor, label: str) -> _Sum:
        """Begins a sum.

        Args:
            values: Contiguous: what :meth:`place` gave, or any other tensor, which the result will be written to.
            label: What travels, for whoever waits in vain.
        """
        mine, out, self._offered = self._offered, None, None
        if mine is None or mine.data_ptr() != values.data_ptr():
            mine, out = self.place(values.shape, values.dtype).copy_(values), values
            self._offered = None
        if self._transport.watch is not None and self._transport.watch.is_in_vain():
            self.close()  # or this would answer a wait of a rank that has parted from this one
        nbytes = mine.numel() * mine.element_size()
        traffic.record_asked("all_reduce", 2 * nbytes, self._transport.axis)
        traffic.record_ran("all_reduce", 2 * nbytes, self._transport.axis)  # as the backend, which a plan counts
        self._begun += 1
        self._words = _words(label, mine.numel(), mine.dtype)
        made = _Sum(self, self._begun, mine, out, label, self._words, self._transport.issue("sum"))
        self._unfinished[self._begun % _PLACES] = made
        self._tell()
        return made

    def finish(self, work: _Sum) -> torch.Tensor:
        """Waits for the other summands of ``work`` and adds them, in the order of the ranks."""
        number, mine = work.number, work.mine
        if self._is_closed or any(peer.begun < number for peer in self._peers):
            self._guard(lambda: self._wait_for_writers(number), work.label, work.ticket)
        for peer in self._peers:
            if peer.words[number % _PLACES] != work.words:
                self.close()
                raise self._parted(peer, work)
        self._unfinished[number % _PLACES] = None
        summands = {self._transport.rank: mine}
        for peer in self._peers:
            place = peer.places[number % _PLACES].of(mine.numel(), mine.dtype, is_mine=False)
            summands[peer.rank] = place.view(mine.shape)
        return _added([summands[rank] for rank in range(len(summands))], work.out)

    def _tell(self) -> None:
        waiting = [work.number for work in self._unfinished if work is not None]
        read = min(waiting, default=self._begun + 1) - 1
        message = _MESSAGE.pack(self._begun, read) + self._words
        for peer in self._peers:
            peer.tell(message)

    def _parted(self, peer: _Peer, work: _Sum) -> DivergenceError:
        said = {self._transport.rank: work.words, peer.rank: peer.words[work.number % _PLACES]}
        names = self._transport.ranks
        parts = [f"rank {names[rank]} sums {words.decode(errors='replace')}" for rank, words in sorted(said.items())]
        return DivergenceError(
            f"ranks took different branches: {'; '.join(parts)}. Ranks that share layers must run the same ones, in "
            "one order. Make the branch depend on data that is equal on all of them"
        )

    def _wait_for_writers(self, number: int) -> None:
        if self._is_closed:  # what is there may be of another sum than this one
            raise RuntimeError("the connections were closed after an earlier failure")
        for peer in self._peers:
            while peer.begun < number:
                peer.hear()

    def _wait_for_readers(self, number: int) -> None:
        self._tell()  # they may wait for this rank likewise, and their next sum would be the next to say so
        for peer in self._peers:
            while peer.read < number:
                peer.hear()

    def _guard(self, blocking: Callable[[], None], label: str, ticket: tuple[str, int] | None) -> None:
        catch_up()
        self._transport.guard(blocking, ticket or self._transport.issue("room"), label)

    def close(self) -> None:
        """Makes whoever waits for this rank, or in it, raise."""
        self._is_closed = True
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)


class _Sum:
    """A sum on its way.

    Attributes:
        number: Of the sum.
        mine: This rank's summand, where the others see it.
        out: Where the result goes; None: memory of its own.
        label: What travels.
        words: The same, with its size, as the ranks compare it.
        ticket: Of the watch.
    """

    def __init__(
        self,
        sums: SameHostSums,
        number: int,
        mine: torch.Tensor,
        out: torch.Tensor | None,
        label: str,
        words: bytes,
        ticket: tuple[str, int],
    ) -> None:
        self.number, self.mine, self.out = number, mine, out
        self.label, self.words, self.ticket = label, words, ticket
        self._sums: SameHostSums | None = sums
        self._result = mine

    def wait(self) -> torch.Tensor:
        """The sum, in the shape of the summand and no view of anything; may be called again."""
        if self._sums is not None:
            self._result = self._sums.finish(self)
            self._sums = None
        return self._result


@functools.lru_cache(maxsize=4096)
def _words(label: str, numel: int, dtype: torch.dtype) -> bytes:
    return f"{label} ({numel} elements of {dtype})".encode()[: _LONGEST - _MESSAGE.size]


def _added(parts: list[torch.Tensor], out: torch.Tensor | None) -> torch.Tensor:
    if len(parts) == 2:
        return torch.add(*parts, out=torch.empty_like(parts[0]) if out is None else out)
    wide = parts[0].dtype if parts[0].dtype.itemsize > 2 else torch.float32
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total.to(parts[0].dtype) if out is None else out.copy_(total)


def _abort(reference: weakref.ref[SameHostSums]) -> None:
    sums = reference()
    if sums is not None:
        sums.close()


# -- finding each other ------------------------------------------------------------------------------------------------


def same_host_sums(transport: Transport) -> SameHostSums | None:
    """Sums over the ranks of ``transport``; None where they are not all on one host, or have another backend.

    Every rank of ``transport`` must call it, at the same time.
    """
    if stand_in() is not None or not isinstance(transport, GlooTransport):
        return None
    found: tuple[list[int], list[_Peer]] | None = None
    listener: socket.socket | None = None
    address = ""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            address = f"\0deepspeed-{secrets.token_hex(16)}"
            listener.bind(address)
            listener.listen(transport.size)
            listener.settimeout(_MEETING)
    what = "finding the ranks of one host"
    addresses = gather_objects(transport, (_host(), address if listener is not None else ""), label=what)
    if listener is not None and len({host for host, _ in addresses}) == 1 and all(where for _, where in addresses):
        with contextlib.suppress(OSError):  # of different network namespaces: the others cannot be reached
            found = _connect(transport, listener, [where for _, where in addresses])
    if listener is not None:
        listener.close()
    if not all(gather_objects(transport, found is not None, label=what)) or found is None:
        return None
    return SameHostSums(transport, *found)


def _host() -> str:
    """A name of this boot of this host."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{socket.gethostname()} {file.read()}"
    return f"{socket.gethostname()} {os.getpid()}"


def _connect(transport: Transport, listener: socket.socket, addresses: list[str]) -> tuple[list[int], list[_Peer]]:
    """Connects to every rank before this one and waits for those after it; then they hand each other their memory."""
    files = [os.memfd_create("deepspeed sums") for _ in range(_PLACES)]
    connections: dict[int, socket.socket] = {}
    for rank in range(transport.rank):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.settimeout(_MEETING)
        made.connect(addresses[rank])
        made.send(_MESSAGE.pack(transport.rank, 0))
        connections[rank] = made
    while len(connections) < transport.size - 1:
        made, _ = listener.accept()
        made.settimeout(_MEETING)
        rank, _ = _MESSAGE.unpack(made.recv(_MESSAGE.size))
        connections[rank] = made
    for made in connections.values():
        socket.send_fds(made, [b"places"], files)
    peers = []
    for rank, made in sorted(connections.items()):
        _, theirs, _, _ = socket.recv_fds(made, 64, _PLACES)
        made.settimeout(None)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(_PATIENCE.total_seconds()), 0))
        peers.append(_Peer(rank, made, list(theirs)))
    return files, peers
