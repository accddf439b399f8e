"""Short messages between ranks of one host, from one main thread straight to another.

Gloo has threads of its own for what it sends and receives, so that a message wakes one of them before it wakes whom it
is for, and each of its transfers is an object with a life of its own. For what is small and on the critical path of a
step, that is most of the time. Here a message is one call of the sender and one of the receiver.

Messages lie in *boxes*, by number: those of one box come in the order in which they were sent, and those of different
boxes never meet, whoever asks first.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

LONGEST = 1 << 16  # bytes of a message: what a socket holds of them is limited
_BOX = struct.Struct("=q")
_Buffer = Any  # what has the buffer protocol


class Mail:
    """Messages to and from the other ranks of a group, for one thread at a time.

    Args:
        connections: By rank in the group, connected sockets that keep messages apart.
        seconds: The longest wait for a rank that should say something.
    """

    def __init__(self, connections: Mapping[int, socket.socket], seconds: float) -> None:
        self._connections = dict(connections)
        self._seconds = seconds
        self._kept: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)  # came before anybody asked
        self._unsent: dict[int, deque[bytes]] = {}  # by rank, what its socket had no room for
        self._head = bytearray(_BOX.size)
        self._spill = bytearray(LONGEST)

    def post(self, peer: int, box: int, message: _Buffer) -> None:
        """Sends up to :data:`LONGEST` bytes; does not block. To a rank that has gone nothing is sent: a wait will show.

        Args:
            peer: The rank it is for.
            box: Where it will lie there.
            message: Contiguous memory, which may be written to afterwards.
        """
        if self._unsent:
            self._send_on()
        if peer not in self._unsent:
            try:
                self._connections[peer].sendmsg((_BOX.pack(box), message), (), socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                self._unsent[peer] = deque()
            except ConnectionError:
                return
        self._unsent[peer].append(_BOX.pack(box) + bytes(message))

    def take(self, peer: int, box: int, room: memoryview) -> None:
        """Waits for the next message of a box.

        Args:
            peer: The rank that it is from.
            box: Where it lies.
            room: Memory of bytes, as long as the message must be; receives it.

        Raises:
            RuntimeError: It can never come, did not come in time, or has another length.
        """
        if kept := self._kept.get((peer, box)):
            message = kept.popleft()
            _check_length(len(message), len(room), peer)
            room[:] = message
            return
        while True:
            if self._unsent:
                self._wait_for(peer)
            length = self._hear(peer, room)
            if self._box() == box:
                _check_length(length, len(room), peer)
                return
            message = bytes(room[:length]) + bytes(self._spill[: max(length - len(room), 0)])
            self._kept[peer, self._box()].append(message)

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for room."""
        return bool(self._unsent)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended that this was for."""
        return not self._connections

    def flush(self) -> None:
        """Waits until everything has been sent."""
        self._wait_for(None)

    def _hear(self, peer: int, room: memoryview) -> int:
        """Waits for a rank's next message, of any box, into ``room`` and then the spill; its length."""
        try:
            try:
                length = self._connections[peer].recvmsg_into((self._head, room, self._spill))[0]
            except ConnectionResetError:  # it left without reading all; said once, and then comes what it had sent
                length = self._connections[peer].recvmsg_into((self._head, room, self._spill))[0]
        except BlockingIOError:
            raise RuntimeError(f"rank {peer} of the group said nothing within the group's time limit") from None
        except OSError as error:
            raise RuntimeError(f"nothing came from rank {peer} of the group ({error})") from error
        if not length:
            raise RuntimeError(f"rank {peer} of the group has closed its connection")
        return length - _BOX.size

    def _box(self) -> int:
        """Of the message that was read last."""
        number: int = _BOX.unpack(self._head)[0]
        return number

    def _wait_for(self, wanted: int | None) -> None:
        """Waits until ``wanted`` has said something, or with None until nothing is unsent; sends what can be sent.

        With None it reads what comes meanwhile, from anybody: others may wait for room likewise, in a circle.
        """
        heard = set(self._connections) if wanted is None else {wanted}
        while self._unsent:
            numbers = {self._connections[peer].fileno(): peer for peer in heard | self._unsent.keys()}
            poll = select.poll()
            for number, peer in numbers.items():
                wishes = (select.POLLIN if peer in heard else 0) | (select.POLLOUT if peer in self._unsent else 0)
                poll.register(number, wishes)
            ready = {numbers[number]: events for number, events in poll.poll(1000 * self._seconds)}
            if not ready:
                raise RuntimeError(f"ranks {sorted(self._unsent)} of the group read nothing within its time limit")
            self._send_on()
            if wanted in ready and ready[wanted] & ~select.POLLOUT:
                return
            for peer in ready.keys() & heard if wanted is None else ():
                if ready[peer] & ~select.POLLOUT and not self._keep_next(peer):
                    heard.discard(peer)  # it has gone; whoever needs it will find that out

    def _keep_next(self, peer: int) -> bool:
        """Keeps what is there of a rank; whether it can say more."""
        try:
            length = self._connections[peer].recvmsg_into((self._head, self._spill), 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return True
        except OSError:
            return False
        if length:
            self._kept[peer, self._box()].append(bytes(self._spill[: length - _BOX.size]))
        return length > 0

    def _send_on(self) -> None:
        for peer, messages in list(self._unsent.items()):
            with contextlib.suppress(BlockingIOError):
                while messages:
                    try:
                        self._connections[peer].send(messages[0], socket.MSG_DONTWAIT)
                    except ConnectionError:
                        messages.clear()
                        break
                    messages.popleft()
            if not messages:
                del self._unsent[peer]

    def close(self) -> None:
        """Makes whoever waits for this rank, or in it, raise."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """The job is over."""
        self.close()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._unsent.clear()


def _check_length(found: int, expected: int, peer: int) -> None:
    if found != expected:
        raise RuntimeError(
            f"rank {peer} of the group sent {found} bytes where {expected} were expected: the ranks do not do the same"
        )
