"""The port where the ranks of a run meet."""

from __future__ import annotations

import errno
import socket
import sys
from dataclasses import dataclass, field

from deepspeed.launcher.resources import LauncherError

DEFAULT_PORT = 29500


@dataclass
class PortClaim:
    """A port that other launchers on this machine leave alone while this object is open.

    Rank 0 opens the port seconds after the launcher has chosen it, and two runs started together would both find the
    default free. A name in Linux's abstract socket space marks it meanwhile: it is gone with the last process that
    holds it, and needs no file.

    Attributes:
        port: The port.
    """

    port: int
    _mark: socket.socket | None = field(default=None, repr=False)

    def __enter__(self) -> PortClaim:
        return self

    def __exit__(self, *_: object) -> None:
        if self._mark is not None:
            self._mark.close()


def claim_port(address: str, requested: int | None) -> PortClaim:
    """Chooses the port for the ranks' meeting point on this machine.

    Args:
        address: Where rank 0 will listen.
        requested: The user's choice; None or the default (which some tools always pass) means the default, or a free
            one if that is taken.

    Raises:
        LauncherError: The user's choice is taken.
    """
    if not _is_local(address):
        return PortClaim(requested or DEFAULT_PORT)
    if requested is not None and requested != DEFAULT_PORT:
        if not _is_free(requested):
            raise LauncherError(
                f"--master_port {requested}: the port is taken on this machine (or not permitted); "
                "choose another one, or leave the option out to get a free one"
            )
        return PortClaim(requested)
    if _is_free(DEFAULT_PORT):
        is_ours, mark = _mark(DEFAULT_PORT)
        if is_ours:
            return PortClaim(DEFAULT_PORT, mark)
    return PortClaim(_free_port())


def _mark(port: int) -> tuple[bool, socket.socket | None]:
    """Marks the port as ours: whether nobody else has, and what to keep open meanwhile."""
    if not sys.platform.startswith("linux"):
        return True, None
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        mark.bind(f"\0deepspeed-launcher-port-{port}")
    except OSError:
        mark.close()
        return False, None
    return True, mark


def _is_local(address: str) -> bool:
    return address in ("localhost", "127.0.0.1", "::1", socket.gethostname())


def _is_free(port: int) -> bool:
    for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # Without this, a port that was in use a minute ago would count as taken.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((anywhere, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                return False
            # Any other error of the second family: this machine has no IPv6.
    return True


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
