"""Shared memory of the ranks of one host, and the messages about its content.

Gloo sends through sockets with its own threads, which take processor time from the computation. Here a rank writes
into shared memory and sends one short message.

Transfers are rounds, which all ranks start in one order. A rank has :data:`REGIONS` regions of memory, used in turn. A
region is reused when every receiver has confirmed, in a message, that it has read its part. Messages also name the
operation of a round, so that diverged ranks raise instead of reading a wrong tensor. The memory and the sockets have no
names in a file system, so a killed process leaves nothing behind; when a process ends, its sockets wake the ranks that
wait for it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from deepspeed.comm.host.sockets import connect_on_host, limit_waits
from deepspeed.comm.transports.transport import Transport, job_is_over
from deepspeed.errors import CommunicationError, DivergenceError

REGIONS = 2
MOST = 64 * 2**20  # most bytes for one receiver; the backend sends larger ones, since this memory stays allocated
_GRAIN = 2**20  # granularity of a region's size, in bytes
_MESSAGE = struct.Struct("=qqqq")  # rounds that the sender has started and has read, start and length of the payload
_LONGEST = 512  # most bytes of a message, which ends with the operation of the last round
LONGEST_WORDS = _LONGEST - _MESSAGE.size


class SharedRegion:
    """Memory that its owner writes and others read, by a descriptor; what the owner grows, grows for all others too."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._view, self._start = self._bytes, 0
        weakref.finalize(self, os.close, file)

    def of(self, numel: int, dtype: torch.dtype, *, start: int = 0, is_mine: bool) -> torch.Tensor:
        """Returns the elements at byte ``start``, 1-D.

        Raises:
            CommunicationError: The memory could not be allocated.
        """
        if self._view.dtype == dtype and self._view.numel() == numel and self._start == start:
            return self._view
        stop = start + numel * dtype.itemsize
        with torch.inference_mode(False):  # an inference tensor could not be written outside inference mode
            if stop > self._bytes.numel():
                self._bytes = self._grown(-(-stop // _GRAIN) * _GRAIN, is_mine)
            self._view, self._start = self._bytes[start:stop].view(dtype), start
        return self._view

    def _grown(self, length: int, is_mine: bool) -> torch.Tensor:
        try:
            if is_mine:
                os.ftruncate(self._file, length)
            return torch.frombuffer(mmap.mmap(self._file, length), dtype=torch.uint8)
        except (OSError, ValueError) as error:
            raise CommunicationError(
                f"the ranks of this host exchange tensors through {length} bytes of shared memory, which could not be "
                f"allocated: {error}. Raise this process's limits (ulimit -v, ulimit -f), or send less at once"
            ) from error


class RoundMessage(NamedTuple):
    """The message of a rank about one round."""

    start: int  # byte of the sender's region where it begins
    nbytes: int  # its length there
    words: bytes  # the operation; at most :data:`LONGEST_WORDS` bytes


class HostPeer:
    """This rank's record of another rank."""

    def __init__(self, rank: int, connection: socket.socket, files: list[int]) -> None:
        self.rank = rank  # in the group
        self.connection = connection
        self.regions = [SharedRegion(file) for file in files]  # where it writes
        self.started = self.read = 0  # rounds that it has begun, and that it has read completely
        self._messages = [RoundMessage(0, 0, b"")] * REGIONS

    def round_message(self, number: int) -> RoundMessage:
        """Its message about one of its latest rounds."""
        return self._messages[number % REGIONS]

    def wrote(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns what it wrote for this rank in one of its latest rounds, 1-D."""
        region, round_message = self.regions[number % REGIONS], self._messages[number % REGIONS]
        return region.of(round_message.nbytes // dtype.itemsize, dtype, start=round_message.start, is_mine=False)

    def receive(self) -> None:
        """Waits for its next message.

        Raises:
            RuntimeError: None came in time, or the connection is closed.
        """
        try:
            try:
                message = self.connection.recv(_LONGEST)
            except ConnectionResetError:  # it left without reading all; reported once, and then comes what it had sent
                message = self.connection.recv(_LONGEST)
        except BlockingIOError:
            raise RuntimeError(f"rank {self.rank} of the group sent nothing within the group's time limit") from None
        except OSError as error:
            raise RuntimeError(f"nothing came from rank {self.rank} of the group ({error})") from error
        if not message:
            raise RuntimeError(f"rank {self.rank} of the group has closed its connection")
        self.take(message)

    def take(self, message: bytes) -> None:
        """Records what a message of it says."""
        self.started, self.read, start, nbytes = _MESSAGE.unpack_from(message)
        self._messages[self.started % REGIONS] = RoundMessage(start, nbytes, message[_MESSAGE.size :])


class Round(Protocol):
    """A round that this rank has begun."""

    number: int  # the number of the round

    def wait(self) -> object:
        """Reads what the others wrote for this rank, and confirms it by :meth:`SameHost.has_read`."""


class SameHost:
    """The rounds of ranks of one host. All of them must begin the same ones, in one order."""

    def __init__(self, transport: Transport, files: list[int], peers: list[HostPeer]) -> None:
        self.transport = transport  # over these ranks; its watch sees the waits
        self.peers = peers
        self._regions = [SharedRegion(file) for file in files]
        self._started = 0
        self._unread: list[Round | None] = [None] * REGIONS
        self._readers: list[list[HostPeer]] = [[] for _ in range(REGIONS)]
        self._messages = [RoundMessage(0, 0, b"")] * len(peers)
        self._is_closed = False
        if transport.watch is not None:
            transport.watch.supervise(self)

    def place(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        """Returns memory for the next round, 1-D; waits until the others have read its former content."""
        if not self._regions:
            raise job_is_over(label)
        number = self._started + 1
        earlier = self._unread[number % REGIONS]
        if earlier is not None:
            earlier.wait()
        wanted = number - REGIONS
        for peer in self.peers:
            # A rank does not wait for a peer without data for it, so read its messages here before they fill the
            # socket.
            if peer.started != self._started:
                with contextlib.suppress(OSError):
                    while message := peer.connection.recv(_LONGEST, socket.MSG_DONTWAIT):
                        peer.take(message)

        def wait_for_readers() -> None:
            # they may wait for this confirmation, which would otherwise be sent only with the next round
            self._send_progress()
            for peer in self._readers[number % REGIONS]:
                while peer.read < wanted:
                    peer.receive()

        if any(peer.read < wanted for peer in self._readers[number % REGIONS]):
            self._guard(wait_for_readers, label, None)
        return self._regions[number % REGIONS].of(numel, dtype, is_mine=True)

    def next_number(self) -> int:
        """Returns the number of the next round."""
        return self._started + 1

    def begin(self, started: Round, messages: list[RoundMessage]) -> None:
        """Sends each of :attr:`peers` its message that a round, whose number is the next one, has been written."""
        if not self._regions:
            raise job_is_over(messages[0].words.decode(errors="replace"))
        if self.transport.watch is not None and self.transport.watch.is_in_vain():
            self.close()  # or this message would complete a wait of a rank that has diverged from this one
        region = started.number % REGIONS
        self._started, self._unread[region], self._messages = started.number, started, messages
        self._readers[region] = [
            peer for peer, round_message in zip(self.peers, messages, strict=True) if round_message.nbytes
        ]
        self._send_progress()

    def wait_for(self, peers: Sequence[HostPeer], number: int, label: str, ticket: tuple[str, int]) -> None:
        """Waits until ``peers`` have begun round ``number``."""
        if not self._regions:  # closed by this rank: not a failed wait whose reason other ranks could report
            raise job_is_over(label)

        def wait_for_writers() -> None:
            if self._is_closed:  # the memory may hold another round
                raise RuntimeError("the connections were closed after an earlier failure")
            for peer in peers:
                while peer.started < number:
                    peer.receive()

        if self._is_closed or any(peer.started < number for peer in peers):
            self._guard(wait_for_writers, label, ticket)

    def has_read(self, number: int) -> None:
        """Records that this rank has read its part of round ``number``."""
        self._unread[number % REGIONS] = None

    def parted(self, number: int, peer: HostPeer, mine: str, doing: str) -> DivergenceError:
        """Returns the error for a ``peer`` that has started another operation than ``mine``; closes the connections."""
        self.close()
        words_by_rank = {
            self.transport.rank: mine,
            peer.rank: peer.round_message(number).words.decode(errors="replace"),
        }
        names = self.transport.ranks
        parts = "; ".join(f"rank {names[rank]} {doing} {words}" for rank, words in sorted(words_by_rank.items()))
        return DivergenceError(
            f"ranks took different branches: {parts}. Ranks that share layers must run the same ones, in one order. "
            "Make the branch depend on data that is equal on all of them"
        )

    def _send_progress(self) -> None:
        unread = [work.number for work in self._unread if work is not None]
        read = min(unread, default=self._started + 1) - 1
        for peer, (start, nbytes, words) in zip(self.peers, self._messages, strict=True):
            with contextlib.suppress(ConnectionError):  # it may have done its part already; otherwise the wait raises
                peer.connection.send(_MESSAGE.pack(self._started, read, start, nbytes) + words)

    def _guard(self, blocking: Callable[[], None], label: str, ticket: tuple[str, int] | None) -> None:
        self.transport.progress_pending()
        self.transport.guard(blocking, ticket or self.transport.issue("staging buffer"), label)

    def close(self) -> None:
        """Makes waits for this rank raise, on other ranks and on this one."""
        self._is_closed = True
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Closes the connections and frees the memory. Called when the job ends."""
        self.close()
        for peer in self.peers:
            peer.connection.close()
            peer.regions = []
        self._regions, self._unread = [], [None] * REGIONS


def join_same_host(transport: Transport, label: str) -> SameHost | None:
    """Connects the ranks of ``transport``; None where they are not all on one host, or have another backend.

    Every rank of ``transport`` must call it, at the same time.
    """
    return connect_on_host(transport, _exchange_memory, label)


def _new_memory() -> int:
    """Makes memory that can grow but not shrink: reading beyond a shrunk file would kill a rank (SIGBUS)."""
    import fcntl  # not available on every system, nor are these files

    file = os.memfd_create("deepspeed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return file


def _exchange_memory(transport: Transport, connections: dict[int, socket.socket]) -> SameHost:
    """Exchanges the shared memory of the ranks."""
    files = [_new_memory() for _ in range(REGIONS)]
    try:
        for made in connections.values():
            socket.send_fds(made, [b"regions"], files)
        peers = []
        for rank, made in connections.items():
            _, theirs, _, _ = socket.recv_fds(made, 64, REGIONS)
            if len(theirs) != REGIONS:
                for file in theirs:
                    os.close(file)
                raise OSError(f"rank {rank} of the group handed over {len(theirs)} files instead of {REGIONS}")
            limit_waits(made, transport)
            peers.append(HostPeer(rank, made, list(theirs)))
    except OSError:
        for file in files:
            os.close(file)
        raise
    return SameHost(transport, files, peers)
