"""A connection between every two processes of a run: when a process ends, all others see it at once.

The kernel closes the sockets of a process however it ends, so a loss is detected in milliseconds, without a time limit.
A machine or a network that goes down closes nothing; there TCP's keep-alive decides after about ten seconds.

A process that is stopped closes nothing either. Where :meth:`MemberLinks.expect_beats` has been called, members send
each other signs of life.

One thread per process reads all links. It puts messages into an inbox, which the training thread reads, and makes
pending waits of the training thread raise when a member is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hmac
import json
import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from deepspeed.comm.members.member import RunMember
from deepspeed.errors import CommunicationError

_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 11_000}
_SEND_SECONDS = 5.0
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.02
_LONGEST_LINE = 1 << 22
_BEATS = 4  # heartbeats per ``silence``, after which a member without one is lost
_UNCERTAIN = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN})


@dataclass(frozen=True)
class LostMember:
    """A member whose link has ended without a leave message."""

    member: RunMember  # which
    seen: float  # when, in seconds of the monotonic clock
    is_certain: bool  # Its socket was closed, so the process has ended. Otherwise it, or its machine, does not answer.
    cause: str = ""  # the reason, if this process knows it, as text; else empty


@dataclass
class _Link:
    """One connected socket; ``number`` is that of the member at the other end, None until it has identified itself.

    ``last_sign`` is when the last sign of life came, None before the first: who has not begun cannot have stopped.
    ``joining`` is how many processes want to join through that member, where it is a spare, and since which job.
    """

    peer: socket.socket
    number: int | None = None
    received: bytes = b""
    join_request: dict[str, Any] | None = None
    last_sign: float | None = None
    cause: str = ""
    joining: tuple[int, int] = (0, 0)
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemberLinks:
    """The links of this process, which listens at an address of its host that the other members can reach."""

    def __init__(self, host: str, token: str) -> None:
        self.token = token  # a secret of the run: a process without it is refused
        self.number = -1  # this process's number among the members; -1 before it has one
        # called in the watching thread when a member is lost; None: not reported
        self.on_loss: Callable[[LostMember], None] | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        # where this process listens: host and port
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._members: dict[int, RunMember] = {}
        self._epoch = 0
        self._links: dict[int, _Link] = {}
        self._joining: list[_Link] = []
        self._lost: dict[int, LostMember] = {}
        self._gone: set[int] = set()  # members that left with a message, or were removed from the run
        self._received: deque[tuple[int, dict[str, Any]]] = deque()
        self._changed = threading.Condition()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for end in (self._listener, self._wake_reader):
            end.setblocking(False)
            self._selector.register(end, selectors.EVENT_READ)
        self._new: deque[_Link] = deque()
        self._silence = 0.0  # seconds after which a member without a sign of life is lost; 0: never
        self._beaten = 0.0  # when this process has sent its last one
        self._is_over = False
        self._is_dropped = False
        _present.add(self)
        atexit.register(self._abandon)
        self._thread = threading.Thread(target=self._serve, name="deepspeed-members", daemon=True)
        self._thread.start()

    # -- called by the training thread ---------------------------------------------------------------------------------

    @property
    def lost(self) -> dict[int, LostMember]:
        """Members that were lost since :meth:`settle`, by number."""
        with self._changed:
            return dict(self._lost)

    @property
    def is_closed(self) -> bool:
        """Whether this process has sent the leave message."""
        return self._is_over

    @property
    def is_dropped(self) -> bool:
        """Whether another member has found this process lost, so that the run continues without it."""
        with self._changed:
            return self._is_dropped

    @property
    def departed(self) -> set[int]:
        """Numbers of members whose programs have come to their end."""
        with self._changed:
            return set(self._gone)

    @property
    def join_requests(self) -> list[dict[str, Any]]:
        """Messages of processes that want to join through this one."""
        with self._changed:
            return [link.join_request for link in self._joining if link.join_request is not None]

    @property
    def joining(self) -> int:
        """The number of join requests to this process, or to spares that have reported theirs."""
        with self._changed:
            elsewhere = (link.joining for link in self._links.values())
            return len(self._joining) + sum(count for epoch, count in elsewhere if epoch == self._epoch)

    @property
    def living(self) -> list[RunMember]:
        """Members that this process is linked with, and itself, in the order of their numbers."""
        with self._changed:
            there = [m for n, m in self._members.items() if n == self.number or n in self._links]
        return sorted(there, key=lambda member: member.number)

    @property
    def members(self) -> list[RunMember]:
        """The members of the run as it was settled last, in the order of their numbers."""
        with self._changed:
            return sorted(self._members.values(), key=lambda member: member.number)

    def expect_beats(self, silence: float) -> None:
        """Sends heartbeats. A member counts as lost after ``silence`` seconds without one; 0 turns heartbeats off.

        All members must call it.
        """
        self._silence = silence
        self._wake()

    def drop(self, number: int) -> None:
        """Ends the link to a member that others have lost; it is lost to this process too."""
        with self._changed:
            link = self._links.get(number)
        if link is not None:
            _send(link, {"kind": "dropped"})  # it may live behind a network that is broken only in part
            with contextlib.suppress(OSError):
                link.peer.shutdown(socket.SHUT_RDWR)  # the watching thread finds its end

    def wait_for_loss(self, seconds: float) -> bool:
        """Waits until a member is lost; returns whether one is."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._lost), seconds)

    def settle(self, members: Sequence[RunMember], me: int, epoch: int = 0) -> None:
        """Sets the members of the run, number ``me`` among them, and the epoch of their job; clears :attr:`lost`."""
        kept = {member.number for member in members}
        with self._changed:
            self._epoch = epoch
            self.number = me
            self._gone |= {number for number in self._lost if number not in kept}
            self._lost = {number: lost for number, lost in self._lost.items() if number in kept}
            self._members = {member.number: member for member in members}

    def connect(self, seconds: float) -> None:
        """Links this process with every member. All members must call it.

        Raises:
            CommunicationError: A member did not connect in time, or was lost.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            missing = [m for number, m in self._members.items() if number < self.number and number not in self._links]
        for member in missing:  # the younger one connects
            self.adopt(self._reach(member, deadline), member.number)
        with self._changed:
            everybody = set(self._members) - {self.number}
            self._changed.wait_for(
                lambda: bool(self._lost) or everybody <= self._links.keys(), max(deadline - time.monotonic(), 0.0)
            )
            absent = sorted(everybody - self._links.keys())
            if self._lost or absent:
                raise CommunicationError(
                    f"the members {absent or sorted(self._lost)} of the run could not be connected within "
                    f"{seconds:.0f} s"
                )

    def send(self, number: int, message: dict[str, Any]) -> None:
        """Sends a message to a member. If it cannot be sent, the member is found to be lost."""
        with self._changed:
            link = self._links.get(number)
        if link is not None:
            _send(link, message)

    def reply_to_join_requests(self, message: dict[str, Any], numbers: dict[str, int]) -> None:
        """Sends a message to the processes that want to join through this one, and takes them as members.

        ``numbers`` has the number of each, by :func:`join_key`; those that are not in it wait on.
        """
        with self._changed:
            waiting = list(self._joining)
        for link in waiting:
            assert link.join_request is not None
            number = numbers.get(join_key(link.join_request))
            if number is not None:
                _send(link, {**message, "number": number, "sender": self.number})
                with self._changed:
                    self._joining.remove(link)
                    link.number = number
                    self._links[number] = link

    def receive(self, seconds: float) -> tuple[int, dict[str, Any]] | None:
        """Returns the next message with the number of its sender; None if none comes, or a member is lost meanwhile."""
        with self._changed:
            known = len(self._lost)
            self._changed.wait_for(lambda: bool(self._received) or len(self._lost) > known, seconds)
            return self._received.popleft() if self._received else None

    def close(self) -> None:
        """Sends all members the leave message and ends."""
        with self._changed:
            links = [*self._links.values(), *self._joining]
        for link in links:
            _send(link, {"kind": "leaving"})
        atexit.unregister(self._abandon)
        self._is_over = True
        self._wake()
        self._thread.join(_SEND_SECONDS)

    def _abandon(self) -> None:
        """Ends all links without the leave message: called first when the interpreter ends, which may take seconds.

        The other members must not take the error of their own waits for a failure of their program meanwhile.
        """
        self.on_loss = None
        for link in list(self._links.values()):
            with contextlib.suppress(OSError):
                link.peer.shutdown(socket.SHUT_RDWR)

    # -- links ---------------------------------------------------------------------------------------------------------

    def _reach(self, member: RunMember, deadline: float) -> socket.socket:
        while True:
            try:
                peer = socket.create_connection(member.address, timeout=_CONNECT_SECONDS)
                break
            except OSError as error:
                if time.monotonic() > deadline or self.lost:
                    raise CommunicationError(
                        f"{member.name} does not accept connections at {member.address[0]}:{member.address[1]} "
                        f"({error}). Check that its host can be reached from here"
                    ) from error
                time.sleep(_RETRY_SECONDS)
        peer.sendall(_line({"kind": "hello", "token": self.token, "number": self.number}))
        return peer

    def adopt(self, peer: socket.socket, number: int, received: bytes = b"") -> None:
        """Takes a connected socket as the link to a member; ``received`` are bytes that were read from it already."""
        link = _Link(prepared(peer), number, received)
        with self._changed:
            self._links[number] = link
            self._new.append(link)
            self._changed.notify_all()
        self._wake()

    # -- the watching thread -------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"x")

    def _serve(self) -> None:
        while not self._is_over:
            for key, _ in self._selector.select(self._silence / _BEATS or None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_reader:
                    self._wake_reader.recv(4096)
                else:
                    self._read(key.data)
            with self._changed:
                while self._new:
                    link = self._new.popleft()
                    self._selector.register(link.peer, selectors.EVENT_READ, link)
            if self._silence:
                self._beat(time.monotonic())
        for key in list(self._selector.get_map().values()):
            with contextlib.suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake_writer.close()

    def _beat(self, now: float) -> None:
        """Sends a sign of life to every member where one is due, and ends the links of those that have sent none."""
        since = now - self._beaten
        if since < self._silence / _BEATS:
            return
        self._beaten = now
        with self._changed:
            links = [link for link in self._links.values() if link.number not in self._gone]
        for link in links:
            if since > self._silence / 2 and link.last_sign is not None:
                # This process itself was stopped or starved: heartbeats of the others may be unread.
                link.last_sign = now
            elif link.last_sign is not None and now - link.last_sign > self._silence:
                self._give_up(link)
                continue
            _send(link, {"kind": "alive"})

    def _give_up(self, link: _Link) -> None:
        """Ends the link to a member that sends no sign of life. A process of this host that is stopped is ended.

        Otherwise it might continue later with states that are old, and its launcher would wait for it.
        """
        member = self._members.get(-1 if link.number is None else link.number)
        link.cause = f"it has sent no heartbeat for {self._silence:g} s (elasticity.heartbeat)"
        if member is not None and member.host == socket.gethostname() and is_stopped(member.pid):
            link.cause += "; its process was stopped by a signal, and has been ended"
            with contextlib.suppress(OSError):
                os.kill(member.pid, signal.SIGKILL)
                return  # its socket closes, which is certain
        _send(link, {"kind": "dropped"})
        self._end(link, is_certain=False)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:  # gone again
            return
        self._selector.register(prepared(peer), selectors.EVENT_READ, _Link(peer))

    def _read(self, link: _Link) -> None:
        try:
            data = link.peer.recv(1 << 16)
            is_certain = True
        except BlockingIOError:
            return
        except OSError as error:
            data, is_certain = b"", error.errno not in _UNCERTAIN
        if not data:
            self._end(link, is_certain=is_certain)
            return
        *lines, link.received = (link.received + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            messages = [None]
        for message in messages:
            if not isinstance(message, dict) or not self._take(link, message):
                self._end(link, is_certain=True)  # not a process of this run
                return
        if len(link.received) > _LONGEST_LINE:
            self._end(link, is_certain=True)

    def _take(self, link: _Link, message: dict[str, Any]) -> bool:
        """Handles a message; returns whether the link may continue."""
        kind = message.get("kind")
        if link.number is None and link.join_request is None:
            token = str(message.get("token", "")).encode(errors="replace")  # of texts it takes ASCII only
            if not hmac.compare_digest(token, self.token.encode()):
                return False
            if kind == "hello" and type(message.get("number")) is int:
                with self._changed:
                    link.number = message["number"]
                    self._links[link.number] = link
                    self._changed.notify_all()
                return True
            if kind == "join_request" and isinstance(message.get("member"), dict):
                with self._changed:
                    link.join_request = message["member"]
                    self._joining.append(link)
                return True
            return False
        with self._changed:
            if link.number is None:
                return True  # it has to wait
            if kind == "alive":
                link.last_sign = time.monotonic()
                return True
            if kind == "leaving":
                self._gone.add(link.number)
            elif kind == "dropped":
                self._is_dropped = True
            elif kind == "joining":
                link.joining = int(message["epoch"]), int(message["count"])
            else:
                self._received.append((link.number, message))
            self._changed.notify_all()
        return True

    def _end(self, link: _Link, *, is_certain: bool) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.peer)
        link.peer.close()
        lost: LostMember | None = None
        with self._changed:
            if link in self._joining:
                self._joining.remove(link)
            if link.number is not None and self._links.get(link.number) is link:
                del self._links[link.number]
                member = self._members.get(link.number)
                if member is not None and link.number not in self._gone:
                    lost = self._lost[link.number] = LostMember(member, time.monotonic(), is_certain, link.cause)
            self._changed.notify_all()
        if lost is not None and self.on_loss is not None:
            self.on_loss(lost)


_present: weakref.WeakSet[MemberLinks] = weakref.WeakSet()


def _close_in_child() -> None:
    """Closes the sockets of links in a forked process: otherwise its parent's end is not seen while it lives."""
    for links in list(_present):
        ends = [link.peer for link in (*links._links.values(), *links._joining, *links._new)]
        for end in (*ends, links._listener, links._wake_reader, links._wake_writer):
            with contextlib.suppress(OSError):
                end.close()


os.register_at_fork(after_in_child=_close_in_child)


def is_stopped(pid: int) -> bool:
    """Returns whether a process of this host is stopped by a signal (``SIGSTOP``), where the system reports it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def join_key(member: dict[str, Any]) -> str:
    """Returns the number that identifies a joining process: where it listens."""
    return json.dumps(member.get("address"))


def prepared(peer: socket.socket) -> socket.socket:
    """Returns a connected socket that does not block and notices a machine that is down."""
    peer.setblocking(False)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in _KEEP_ALIVE.items():
        if hasattr(socket, option):  # macOS lacks some
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return peer


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _send(link: _Link, message: dict[str, Any]) -> None:
    """Sends a message whole. A link that is closed is found so by the watching thread."""
    data, deadline = memoryview(_line(message)), time.monotonic() + _SEND_SECONDS
    with link.lock:
        while data and time.monotonic() < deadline:
            try:
                data = data[link.peer.send(data) :]
            except BlockingIOError:
                time.sleep(_RETRY_SECONDS)
            except OSError:
                return
