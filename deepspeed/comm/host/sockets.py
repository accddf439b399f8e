"""Connects the ranks of one host by a socket between every two of them.

The sockets have no names in any file system, so a process that is killed leaves nothing behind. When a process ends,
its sockets wake the ranks that wait for it. But every user of the host may list their names (``/proc/net/unix``) and
connect. So a rank communicates only with processes of its own user, which must send a token that the ranks have
exchanged.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TypeVar

import torch

from deepspeed.comm.host.gloo import GlooTransport
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.comm.transports.transport import Transport

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_MEETING = 10.0  # seconds in which ranks of one host must find each other
_GREETING = struct.Struct("=q16s")  # the rank that connects, and the token of the rank that it connects to
_CREDENTIALS = struct.Struct("3i")  # process, user and group
_Made = TypeVar("_Made")


def connect_on_host(
    transport: Transport, make: Callable[[Transport, dict[int, socket.socket]], _Made], label: str
) -> _Made | None:
    """Connects the ranks of ``transport``; None where they are not all on one host, or have another backend.

    Every rank of ``transport`` must call it, at the same time. ``make`` makes the result of connections by rank, in the
    order of ranks; it may raise OSError, which is None on all ranks. A wait on them has :data:`_MEETING` seconds until
    :func:`limit_waits` sets another limit.
    """
    if transport.watched is None or not isinstance(transport, GlooTransport):
        return None
    listener: socket.socket | None = None
    address, token = "", secrets.token_bytes(16)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            address = f"\0deepspeed-{secrets.token_hex(16)}"
            listener.bind(address)
            listener.listen(transport.size)
            listener.settimeout(_MEETING)
    mine = (_host(), address if listener is not None else "", token.hex())
    gathered = gather_objects(transport, mine, label=label)
    found: _Made | None = None
    connections: dict[int, socket.socket] = {}
    if listener is not None and len({host for host, _, _ in gathered}) == 1 and all(where for _, where, _ in gathered):
        with contextlib.suppress(OSError):  # of different network namespaces: the others cannot be reached
            for rank, (_, where, theirs) in enumerate(gathered[: transport.rank]):
                connections[rank] = _call(where, transport.rank, bytes.fromhex(theirs))
            later = range(transport.rank + 1, transport.size)
            connections.update(_answer(listener, set(later), token))
            found = make(transport, dict(sorted(connections.items())))
    if listener is not None:
        listener.close()
    if all(gather_objects(transport, found is not None, label=label)):
        return found
    for connection in connections.values():
        connection.close()
    return None


def limit_waits(connection: socket.socket, transport: Transport) -> float:
    """Gives waits on a connection the time limit of ``transport``, and returns it in seconds.

    After it they raise BlockingIOError.
    """
    limit: timedelta = transport.group._get_backend(torch.device("cpu")).options._timeout
    connection.settimeout(None)
    timeout = struct.pack("@ll", int(limit.total_seconds()), limit.microseconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    return limit.total_seconds()


def _host() -> str:
    """Returns a name of this boot of this host."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{socket.gethostname()} {file.read()}"
    return f"{socket.gethostname()} {os.getpid()}"


def _call(address: str, rank: int, token: bytes) -> socket.socket:
    """Connects to a rank before this one.

    Raises:
        OSError: The rank does not listen, or the address is another user's.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _open.add(made)
    made.settimeout(_MEETING)
    try:
        made.connect(address)
        if not _is_mine(made):
            raise PermissionError(f"the socket {address!r} belongs to another user")
        made.send(_GREETING.pack(rank, token))
    except OSError:
        made.close()
        raise
    return made


def _answer(listener: socket.socket, ranks: set[int], token: bytes) -> dict[int, socket.socket]:
    """Returns the connections of these ranks, which send the token. Those of other processes are dropped.

    Raises:
        OSError: One did not connect in time.
    """
    found: dict[int, socket.socket] = {}
    unnamed: set[socket.socket] = set()
    deadline = time.monotonic() + _MEETING
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        stack.callback(_close, unnamed)
        on_failure = stack.enter_context(contextlib.ExitStack())
        on_failure.callback(lambda: _close(found.values()))
        selector.register(listener, selectors.EVENT_READ)
        while len(found) < len(ranks):
            left = deadline - time.monotonic()
            ready = selector.select(max(left, 0.0))
            if not ready or left <= 0.0:  # other processes that keep connecting do not extend the limit
                raise TimeoutError("a rank of this host did not connect in time; it ended or was not started")
            for key, _ in ready:
                if key.data is None:
                    made, _ = listener.accept()
                    _open.add(made)
                    made.settimeout(_MEETING)
                    unnamed.add(made)
                    if _is_mine(made):
                        selector.register(made, selectors.EVENT_READ, made)
                    continue
                selector.unregister(key.data)
                rank = _rank_of(key.data, token)
                if rank in ranks and rank not in found:
                    unnamed.discard(key.data)
                    found[rank] = key.data
        on_failure.pop_all()
    return found


def _rank_of(connection: socket.socket, token: bytes) -> int:
    """Reads a greeting; returns the rank that it names, -1 if it is none."""
    try:
        greeting = connection.recv(_GREETING.size + 1)
    except OSError:
        return -1
    if len(greeting) != _GREETING.size:
        return -1
    rank, received = _GREETING.unpack(greeting)
    return int(rank) if secrets.compare_digest(received, token) else -1


def _is_mine(connection: socket.socket) -> bool:
    """Returns whether the process at the other end runs as this one's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.geteuid())


def _close(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _close_all() -> None:
    """Closes the copies in a forked process; they would keep a killed rank alive until its loaders end."""
    _close(list(_open))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
