"""Short messages between ranks of one host, directly between their main threads.

Gloo sends and receives in its own threads, so a message wakes one of them before the receiver, and each transfer is an
object to be created and freed. For small messages on the critical path of a step, that is most of the time. Here a
message is one system call of the sender and one of the receiver.

Every message has a *tag*, a number: messages with one tag come in the order in which they were sent, and a rank that
requests one tag never gets a message of another.

A socket holds a limited number of unread messages. A thread sends those that do not fit, and ends: the sending rank
itself may be waiting for a message that comes only after they are read.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

LONGEST = 1 << 16  # bytes of a message: a socket's buffer is limited
_SOCKET_BYTES = 1 << 20  # bytes that a socket should hold unread; the system may allow less
_TAG = struct.Struct("=q")
_POLL_SECONDS = 0.005  # seconds between polls for incoming messages while a rank flushes
# Flags of calls, as plain ints, which are faster. On systems without them, `sockets.py` makes no connections.
_NO_SIGNAL, _NO_WAIT = (int(getattr(socket, name, 0)) for name in ("MSG_NOSIGNAL", "MSG_DONTWAIT"))
_NO_SIGNAL_NO_WAIT = _NO_SIGNAL | _NO_WAIT
_Buffer = Any  # what has the buffer protocol


class MessageQueue:
    """Messages to and from the other ranks of a group, for one thread at a time.

    Args:
        connections: By rank in the group, connected sockets that keep messages apart.
        seconds: The longest wait for a rank that should send something. The sockets must have it as their own limit.

    Raises:
        OSError: The system's limits (``net.core.wmem_max``) leave no space for a message of :data:`LONGEST`.
    """

    def __init__(self, connections: Mapping[int, socket.socket], seconds: float) -> None:
        self._connections = dict(connections)
        self._seconds = seconds
        # Messages that arrived before their receive was posted, by rank and tag.
        self._unexpected: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)
        self._requested: defaultdict[int, deque[dict[int, memoryview]]] = defaultdict(deque)  # by tag, see request
        self._senders: dict[int, _SenderThread] = {}  # by rank
        self._is_closed = False
        self._head = bytearray(_TAG.size)
        self._spill = bytearray(LONGEST)
        for connection in self._connections.values():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 2 * LONGEST:
                raise OSError("no free space for messages")

    def post(self, peer: int, tag: int, message: _Buffer) -> None:
        """Sends up to :data:`LONGEST` bytes of contiguous memory, which may be written to afterwards; does not block.

        Ignores a closed connection: a later wait raises.
        """
        if peer in self._senders:
            if self._senders[peer].add(_TAG.pack(tag) + bytes(message)):
                return
            del self._senders[peer]
        connection = self._connections[peer]
        try:
            connection.sendmsg((_TAG.pack(tag), message), (), _NO_SIGNAL_NO_WAIT)
        except BlockingIOError:
            self._senders[peer] = _SenderThread(connection, _TAG.pack(tag) + bytes(message))
        except ConnectionError:
            return

    def take(self, peer: int, tag: int, buffer: memoryview) -> None:
        """Waits for the next message with a tag from ``peer``, as long as ``buffer`` (bytes), which receives it.

        Raises:
            RuntimeError: It can never arrive, did not arrive in time, or has another length. All later waits raise too,
                since messages could no longer be matched with waits.
        """
        if self._is_closed:
            raise RuntimeError("the connections were closed after an earlier failure")
        if kept := self._unexpected.get((peer, tag)):
            message = kept.popleft()
            self._check_length(len(message), len(buffer), peer)
            buffer[:] = message
            return
        while True:
            if self._is_of(tag, peer, self._receive_next(peer, buffer), buffer):
                return

    def take_if_there(self, peer: int, tag: int, buffer: memoryview) -> bool:
        """Reads the next message with a tag, as :meth:`take`, if it has arrived, without waiting; returns whether.

        Raises:
            RuntimeError: It has another length.
        """
        if self._is_closed:
            return False
        if self._unexpected.get((peer, tag)):
            self.take(peer, tag, buffer)
            return True
        buffers = (self._head, buffer, self._spill)
        while True:
            try:
                length = self._connections[peer].recvmsg_into(buffers, 0, _NO_WAIT)[0]
            except OSError:  # no message yet, or a closed connection; the next wait shows which
                return False
            if not length:
                return False
            if self._is_of(tag, peer, length - _TAG.size, buffer):
                return True

    def _is_of(self, tag: int, peer: int, length: int, buffer: memoryview) -> bool:
        """Returns whether what was read last, into ``buffer``, has the tag; otherwise it is kept for its receiver."""
        found = self._tag()
        if found == tag:
            self._check_length(length, len(buffer), peer)
            return True
        message = bytes(buffer[:length]) + bytes(self._spill[: max(length - len(buffer), 0)])
        self._unexpected[peer, found].append(message)
        return False

    def request(self, tag: int, buffers: dict[int, memoryview]) -> Callable[[], None]:
        """Requests the next message with a tag from each of some ranks, ahead of the wait for them.

        Returns a function that waits for them, and raises as :meth:`take` does.
        """
        requested = self._requested[tag]
        requested.append(buffers)

        def wait() -> None:
            while buffers:
                oldest = requested[0]
                while oldest:
                    peer, buffer = oldest.popitem()
                    self.take(peer, tag, buffer)
                requested.popleft()

        return wait

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for free space."""
        if self._senders:
            self._senders = {peer: sender for peer, sender in self._senders.items() if sender.is_alive()}
        return bool(self._senders)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended that this was for."""
        return not self._connections

    def flush(self) -> None:
        """Waits until everything has been sent. Reads what arrives meanwhile: others may wait too, in a cycle."""
        open_peers = set(self._connections)
        left, since = -1, time.monotonic()
        while self.has_unsent:
            before, left = left, sum(sender.left for sender in self._senders.values())
            if left != before:
                since = time.monotonic()
            elif time.monotonic() - since > self._seconds:
                raise self._failed(f"ranks {sorted(self._senders)} of the group read nothing within its time limit")
            open_peers -= {peer for peer in open_peers if not self._keep_all(peer)}
            next(iter(self._senders.values())).join(_POLL_SECONDS)

    def _receive_next(self, peer: int, buffer: memoryview) -> int:
        """Waits for a rank's next message of any tag, into ``buffer`` and then the spill; returns its length."""
        try:
            try:
                length = self._connections[peer].recvmsg_into((self._head, buffer, self._spill))[0]
            # the peer closed with unread data; reported once, after which its own messages can be read
            except ConnectionResetError:
                length = self._connections[peer].recvmsg_into((self._head, buffer, self._spill))[0]
        except BlockingIOError:
            raise self._failed(f"rank {peer} of the group sent nothing within the group's time limit") from None
        except OSError as error:
            raise self._failed(f"nothing came from rank {peer} of the group ({error})") from error
        if not length:
            raise self._failed(f"rank {peer} of the group has closed its connection")
        return length - _TAG.size

    def _check_length(self, found: int, expected: int, peer: int) -> None:
        if found != expected:
            raise self._failed(
                f"rank {peer} of the group sent {found} bytes where {expected} were expected: the ranks run "
                "different operations"
            )

    def _failed(self, words: str) -> RuntimeError:
        """Returns the error to raise; closes the connections, so that no other rank waits for this one."""
        self.close()
        return RuntimeError(words)

    def _tag(self) -> int:
        """Returns the tag of the message that was read last."""
        number: int = _TAG.unpack(self._head)[0]
        return number

    def _keep_all(self, peer: int) -> bool:
        """Stores all messages of a rank that have arrived; returns False if its connection has ended."""
        connection = self._connections[peer]
        while True:
            try:
                length = connection.recvmsg_into((self._head, self._spill), 0, _NO_WAIT)[0]
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not length:
                return False
            self._unexpected[peer, self._tag()].append(bytes(self._spill[: length - _TAG.size]))

    def close(self) -> None:
        """Makes waits for this rank raise, on other ranks and on this one."""
        self._is_closed = True
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Called when the job ends."""
        self.close()
        for sender in self._senders.values():
            sender.join()  # the end of its connection is its own
        for connection in self._connections.values():
            connection.close()
        for held in (self._connections, self._senders, self._unexpected, self._requested):
            held.clear()


class _SenderThread(threading.Thread):
    """Sends messages that did not fit into a socket, as soon as there is space, then ends."""

    def __init__(self, connection: socket.socket, message: bytes) -> None:
        super().__init__(name="deepspeed-send", daemon=True)
        self._connection = connection
        self._messages = deque([message])
        self._lock = threading.Lock()
        self.start()

    @property
    def left(self) -> int:
        """Messages that have not been sent."""
        return len(self._messages)

    def add(self, message: bytes) -> bool:
        """Sends another one after those; whether it will: not when all have been sent."""
        with self._lock:
            if self._messages:
                self._messages.append(message)
            return bool(self._messages)

    def run(self) -> None:
        """Runs the thread that sends."""
        while self._messages:
            try:
                self._connection.send(self._messages[0], _NO_SIGNAL)
            except OSError as error:  # the rank has gone, or this one leaves
                if not isinstance(error, ConnectionError):
                    with contextlib.suppress(OSError):
                        self._connection.shutdown(socket.SHUT_RDWR)  # or the peer would wait for lost messages
                with self._lock:
                    self._messages.clear()
                return
            with self._lock:
                self._messages.popleft()
