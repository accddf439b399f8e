"""The rendezvous port of a run."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed.launcher.resources import LauncherError
from deepspeed.logging import logger
from deepspeed.ports import DEFAULT_PORT, describe_listener, free_port, hold, is_free, is_here


@dataclass
class PortClaim:
    """A port that other programs on this machine do not take while this object is open, as far as it can prevent it.

    Rank 0 opens the port seconds after the launcher has chosen it, and two runs started together would both find it
    free. Until the run ends, a name in Linux's abstract socket namespace marks it for other launchers: the name needs
    no file, and disappears with the last process that has it open. Bound sockets keep it from programs that get any
    free port. A program that wants this very port may still take it: rank 0 then moves to another one
    (:mod:`deepspeed.comm.start.rendezvous`).
    """

    port: int
    _sockets: Sequence[socket.socket] = field(default=(), repr=False)

    def __enter__(self) -> PortClaim:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._sockets:
            each.close()


@dataclass(frozen=True)
class RequestedPort:
    """The port that the user requested."""

    port: int  # the number of the port
    source: str  # how it was given: ``--master_port 29600`` or ``MASTER_PORT=29600``

    @classmethod
    def of(cls, option: int | None, environ: Mapping[str, str] = os.environ) -> RequestedPort | None:
        """Reads the option, or else ``MASTER_PORT``; None if neither is given, or 0, which means any port.

        Raises:
            LauncherError: The value is not a port number.
        """
        text = environ.get("MASTER_PORT", "").strip() if option is None else str(option)
        if text in ("", "0"):
            return None
        source = f"MASTER_PORT={text}" if option is None else f"--master_port {text}"
        if not text.isdecimal() or not 0 < int(text) < 65536:
            raise LauncherError(f"{source}: expected a port from 1 to 65535; correct it, or leave it out")
        return cls(int(text), source)


def claim_port(address: str, requested: RequestedPort | None, *, is_shared: bool = False) -> PortClaim:
    """Chooses the rendezvous port: the one requested, or a free one if that is taken.

    Args:
        address: Where rank 0 will listen. On another machine the requested port is chosen without a check.
        requested: The user's port; None means the default. The default port counts as not requested, as some tools
            always pass it.
        is_shared: Whether other machines need the port too. A requested port is then not replaced, as it may be the
            only one that a firewall permits.

    Raises:
        LauncherError: The port is taken and must not be replaced.
    """
    port = DEFAULT_PORT if requested is None else requested.port
    if not is_here(address):
        return PortClaim(port)
    claim = _claim(port)
    if claim is not None:
        return claim
    if requested is not None and port != DEFAULT_PORT:
        if is_shared:
            raise _port_in_use(requested.source, port)
        chosen = _claim_any()
        logger.warning(
            f"{requested.source}: the port is taken by {_occupant(port)}; this run uses port {chosen.port} instead"
        )
        return chosen
    return _claim_any()


def agreed_port(requested: RequestedPort | None, *, holds_rank_0: bool, is_claimed: bool) -> PortClaim:
    """Returns a run's port, held here if ``holds_rank_0``; ``is_claimed``: the starting command has marked it.

    Raises:
        LauncherError: The port is in use on this machine.
    """
    port = DEFAULT_PORT if requested is None else requested.port
    if not holds_rank_0:
        return PortClaim(port)
    claim = _claim(port, is_marked=is_claimed)
    if claim is None:
        raise _port_in_use(requested.source if requested is not None else f"the default port {port}", port)
    return claim


def _port_in_use(source: str, port: int) -> LauncherError:
    return LauncherError(
        f"{source}: the port is taken on this machine, where rank 0 would listen, by {_occupant(port)}. Choose another "
        f"one, the same on all machines, such as --master_port {free_port()}"
    )


def _occupant(port: int) -> str:
    return "a run that is about to start" if is_free(port) else describe_listener(port)


def _claim(port: int, *, is_marked: bool = False) -> PortClaim | None:
    """Marks and holds a port, if ``is_marked`` one that is marked for this process; None if another process has it."""
    mark: list[socket.socket] = []
    if sys.platform.startswith("linux") and not is_marked:  # only Linux has abstract sockets
        mark.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        try:
            mark[0].bind(f"\0deepspeed-launcher-port-{port}")
        except OSError:
            mark[0].close()
            return None
    held = hold(port)
    if held is None:
        PortClaim(port, mark).__exit__()
        return None
    return PortClaim(port, [*mark, *held])


def _claim_any() -> PortClaim:
    while True:
        claim = _claim(free_port())
        if claim is not None:
            return claim
