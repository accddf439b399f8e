"""Ranks of one host find each other: a socket between every two of them.

The sockets have no names in any file system, so nothing is left behind by a process that is killed, and those of one
that ends wake whoever waits for it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch

from deepspeed.comm.gloo import GlooTransport
from deepspeed.comm.objects import gather_objects
from deepspeed.comm.transport import Transport
from deepspeed.comm.world import stand_in

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_MEETING = 10.0  # seconds in which ranks of one host must find each other
_Made = TypeVar("_Made")


def connect_on_host(
    transport: Transport, make: Callable[[Transport, dict[int, socket.socket]], _Made], label: str
) -> _Made | None:
    """Connects the ranks of ``transport``; None where they are not all on one host, or have another backend.

    Every rank of ``transport`` must call it, at the same time.

    Args:
        transport: Between the ranks.
        make: Makes the result of connections by rank, in the order of ranks; it may raise OSError, which is None on all
            ranks. A wait on them has :data:`_MEETING` seconds until :func:`limit_waits` says otherwise.
        label: What for, for whoever waits in vain.
    """
    if stand_in() is not None or not isinstance(transport, GlooTransport):
        return None
    listener: socket.socket | None = None
    address = ""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            address = f"\0deepspeed-{secrets.token_hex(16)}"
            listener.bind(address)
            listener.listen(transport.size)
            listener.settimeout(_MEETING)
    addresses = gather_objects(transport, (_host(), address if listener is not None else ""), label=label)
    found: _Made | None = None
    connections: dict[int, socket.socket] = {}
    if listener is not None and len({host for host, _ in addresses}) == 1 and all(where for _, where in addresses):
        with contextlib.suppress(OSError):  # of different network namespaces: the others cannot be reached
            _connect(transport, listener, [where for _, where in addresses], connections)
            found = make(transport, dict(sorted(connections.items())))
    if listener is not None:
        listener.close()
    if all(gather_objects(transport, found is not None, label=label)):
        return found
    for connection in connections.values():
        connection.close()
    return None


def limit_waits(connection: socket.socket, transport: Transport) -> float:
    """Lets waits on a connection take as long as those of ``transport`` may; they then raise BlockingIOError.

    Returns:
        How many seconds.
    """
    limit: timedelta = transport.group._get_backend(torch.device("cpu")).options._timeout
    connection.settimeout(None)
    timeout = struct.pack("@ll", int(limit.total_seconds()), limit.microseconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    return limit.total_seconds()


def _host() -> str:
    """A name of this boot of this host."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{socket.gethostname()} {file.read()}"
    return f"{socket.gethostname()} {os.getpid()}"


def _connect(
    transport: Transport, listener: socket.socket, addresses: list[str], connections: dict[int, socket.socket]
) -> None:
    """Connects to every rank before this one and waits for those after it; ``connections`` receives them, by rank."""
    for rank in range(transport.rank):
        made = connections[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _open.add(made)
        made.settimeout(_MEETING)
        made.connect(addresses[rank])
        made.send(struct.pack("=q", transport.rank))
    while len(connections) < transport.size - 1:
        made, _ = listener.accept()
        _open.add(made)
        made.settimeout(_MEETING)
        (rank,) = struct.unpack("=q", made.recv(8))
        connections[rank] = made


def _close_all() -> None:
    """In a process that was forked: with its copies a loader's process would keep a rank alive that has been killed."""
    for connection in list(_open):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
