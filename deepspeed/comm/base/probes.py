"""TCP keep-alive for connections between ranks, so that waits for a machine without power or network end.

Such a machine closes no connection. If only the ranks watch it (under torchrun, mpirun, srun and Kubernetes), a rank
that waits for its data would wait until the time limit of the collective, half an hour. The system
can probe a connection (TCP keep-alive); torch's store and gloo do not enable that. The other
machine's kernel answers a probe, so a busy or suspended process is not taken for lost.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

# The first probe after so much silence, then one per interval. A connection ends after _LOST_SECONDS without an answer,
# to probes or to data: long enough for a switch that starts again.
_IDLE_SECONDS, _INTERVAL_SECONDS = 15, 10
_LOST_SECONDS = 60
_OPTIONS = (
    ("TCP_KEEPIDLE", _IDLE_SECONDS),
    ("TCP_KEEPINTVL", _INTERVAL_SECONDS),
    ("TCP_KEEPCNT", (_LOST_SECONDS - _IDLE_SECONDS) // _INTERVAL_SECONDS + 1),
    ("TCP_USER_TIMEOUT", 1000 * _LOST_SECONDS),
)
_DESCRIPTORS = "/proc/self/fd"


@contextmanager
def probed_connections() -> Iterator[None]:
    """Enables keep-alive for TCP connections opened in the block, and for those that its listeners accept later.

    Where the system does not list a process's sockets (it is not Linux), nothing is probed.
    """
    before = _sockets().keys()
    try:
        yield
    finally:
        for inode, descriptor in _sockets().items():
            if inode not in before:
                _probe(descriptor)


def _sockets() -> dict[str, int]:
    """Returns the descriptors of this process's sockets, by an identity unique to each socket."""
    found = {}
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:  # not Linux
        return {}
    for name in names:
        try:
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:"):
            found[target] = int(name)
    return found


def _probe(descriptor: int) -> None:
    try:
        copy = os.dup(descriptor)
    except OSError:  # closed meanwhile
        return
    try:
        with socket.socket(fileno=copy) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM or _stays(one):
                return
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _OPTIONS:
                if hasattr(socket, name):
                    one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except OSError:  # the connection ended meanwhile
        return


def _stays(one: socket.socket) -> bool:
    """Returns whether both ends of a connection are on this machine."""
    try:
        peer, own = str(one.getpeername()[0]), str(one.getsockname()[0])
    except OSError:  # not connected: it listens
        return False
    return peer == own or ipaddress.ip_address(peer.partition("%")[0]).is_loopback
