"""Finds free TCP ports, the addresses of this machine, and the processes that use a port."""

from __future__ import annotations

import errno
import ipaddress
import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

DEFAULT_PORT = 29500
"""Default rendezvous port."""

_LISTENS = "0A"  # the state TCP_LISTEN in Linux's tables
_MAX_COMMAND = 100  # characters of a command line in messages


_CONNECT_SECONDS = 5.0


def free_port() -> int:
    """Returns a TCP port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def hold(port: int) -> list[socket.socket] | None:
    """Returns sockets that keep ``port``, at all addresses, from programs in search of one; None if it is taken.

    They do not listen, so a program that chooses this port and sets ``SO_REUSEADDR``, as torch's store does, can still
    listen at it.
    """
    held: list[socket.socket] = []
    for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            held.append(socket.socket(family, socket.SOCK_STREAM))
            # Without this, a port in TIME_WAIT would count as used.
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                held[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            held[-1].bind((any_address, port))
        except OSError as error:
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                for each in held:
                    each.close()
                return None
            # Any other error of IPv6 means that this machine does not have it.
    return held


def is_free(port: int) -> bool:
    """Returns whether this process could listen at ``port`` on every address of the machine."""
    held = hold(port)
    for each in held or ():
        each.close()
    return held is not None


def is_here(address: str) -> bool:
    """Returns whether an address is one of this machine; does not look names up."""
    if address in ("localhost", socket.gethostname()):
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except (ValueError, OSError):  # a name, or an address of another machine
        return False
    return True


def addresses_of(name: str) -> list[str]:
    """Returns a host name's addresses, each once. Raises OSError: the name cannot be resolved."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def first_address(name: str) -> str | None:
    """Returns the first address of a host name, without its scope; None if the name cannot be resolved."""
    try:
        return addresses_of(name)[0].partition("%")[0]
    except OSError:
        return None


def why_not_reached(name: str, error: OSError) -> str:
    """Returns a clause on why a connection to ``name`` (or an address) failed, with the addresses of the name."""
    here = socket.gethostname()
    try:
        addresses = addresses_of(name)
    except OSError as unknown:
        return f"host {here} cannot resolve the name {name} ({unknown.strerror or unknown})"
    meaning = "" if addresses == [name] else f", which is {' or '.join(addresses)} on host {here}"
    return f"nobody listens at {name}{meaning} ({error.strerror or error})"


def find_listener(name: str, port: int) -> str:
    """Returns the numeric address at which a program accepts connections, among all that ``name`` resolves to.

    Raises:
        OSError: There is none. :class:`socket.gaierror`: the name is not known.
    """
    with socket.create_connection((name, port), timeout=_CONNECT_SECONDS) as probe:
        peer = probe.getpeername()
        if probe.getsockname() == peer:  # TCP can connect a port to itself on one machine
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return str(peer[0])


def is_listening(name: str, port: int) -> bool:
    """Returns whether a program accepts connections at ``name`` and ``port``."""
    try:
        find_listener(name, port)
    except OSError:  # not there yet
        return False
    return True


def address_towards(host: str) -> str | None:
    """Returns this machine's address on the route to ``host`` (a name or an address); None if there is no route.

    IPv4 addresses of a name are tried first. Nothing is sent: connecting a datagram socket only looks up the route.
    """
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in sorted(found, key=lambda entry: entry[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def describe_listener(port: int) -> str:
    """Returns a description of the process that uses a port of this machine, as far as it can be found.

    Examples:
        ``"process 4242 on host worker-1 (`python train.py`)"``
    """
    host = socket.gethostname()
    try:
        held = [entry for entry in psutil.net_connections("tcp") if entry.laddr and entry.laddr.port == port]
    except (psutil.Error, OSError, RuntimeError):  # not permitted, or /proc is not as psutil expects it
        held = []  # the message that needs this description must not be lost
    listening = [entry for entry in held if entry.status == psutil.CONN_LISTEN]
    pid = next((entry.pid for entry in listening or held if entry.pid is not None), None)
    if pid is not None:
        return f"process {pid} on host {host} (`{command_of(pid)}`)"
    owners = {uid for uid in _users_at(port) if uid != os.getuid()}
    if owners:
        return f"a process of user {_user(min(owners))} on host {host}"
    return f"another program on host {host}"


def command_of(pid: int) -> str:
    """Returns the command line of a process of this machine, shortened; empty where it cannot be read."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return ""
    return shortened([word.decode(errors="replace") for word in words])


def shortened(words: list[str]) -> str:
    """Returns a quoted command line without the program's folder; a long one without its middle."""
    text = " ".join(shlex.join([os.path.basename(word) for word in words[:1]] + words[1:]).split())
    half = (_MAX_COMMAND - 3) // 2
    return text if len(text) <= _MAX_COMMAND else f"{text[:half]}...{text[-half:]}"


def _users_at(port: int) -> Iterator[int]:
    """Yields the users of the sockets at a port, those that listen, or all if none does: psutil knows its own only."""
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        except OSError:  # not Linux, or a machine without the protocol
            continue
        for line in lines:
            columns = line.split()
            if int(columns[1].rpartition(":")[2], 16) == port and columns[9] != "0":
                found.append((columns[3], int(columns[7])))
    listening = [user for state, user in found if state == _LISTENS]
    yield from listening or (user for _, user in found)


def _user(uid: int) -> str:
    import pwd  # missing on systems without /proc

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
