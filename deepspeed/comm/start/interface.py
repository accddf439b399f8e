"""The network interface of gloo on a machine that means the loopback interface by its own name.

Gloo listens at the address of the machine's host name. Many installers write that name into ``/etc/hosts`` as
``127.0.1.1``: ranks on other machines are then sent to themselves. Such a machine lets gloo use the interface of the
route to another machine of the run instead.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import MutableMapping, Sequence
from typing import Any

import psutil

from deepspeed.comm.start.environment import Place
from deepspeed.comm.start.startup import RankInfo
from deepspeed.logging import logger
from deepspeed.ports import address_towards

_VARIABLE = "GLOO_SOCKET_IFNAME"
_KEY = "deepspeed/other_host"


def choose_interface(environ: MutableMapping[str, str], store: Any, place: Place, facts: Sequence[RankInfo]) -> None:
    """Sets ``GLOO_SOCKET_IFNAME`` where gloo would listen where no other machine reaches it. Every rank must call it.

    Nothing is set on one machine, where the name means an address of the network, or where the variable is set.

    Args:
        environ: The environment, for the variable.
        store: The run's own.
        place: Of this rank.
        facts: Of all ranks, on rank 0; empty on the others.
    """
    if place.rank == 0:
        here = facts[0].host
        store.set(_KEY, next((fact.address for fact in facts if fact.host != here and fact.address), ""))
    other = store.get(_KEY).decode()
    if not other or environ.get(_VARIABLE) or not means_loopback(socket.gethostname()):
        return
    mine = address_towards(other)  # where other is an address of this machine: that one
    name = interface_of(mine) if mine is not None else None
    if name is None:
        logger.warning(
            f"the host name {socket.gethostname()} resolves to the loopback interface here, and no route to the other "
            f"machines names another interface, so they may not reach gloo. Set {_VARIABLE} to the network's interface"
        )
        return
    environ[_VARIABLE] = name


def means_loopback(name: str) -> bool:
    """Returns whether a host name is unknown here, or means a loopback address first: gloo takes the first."""
    try:
        first = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return True
    return ipaddress.ip_address(first.partition("%")[0]).is_loopback


def interface_of(address: str) -> str | None:
    """Returns the network interface of this machine that has ``address``; None if none has, or it is the loopback."""
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in entries):
            return name
    return None
