"""A socket that carries JSON objects, one per line, between the launchers of a run."""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from typing import Any

LONGEST_MESSAGE = 1 << 16
# The longest wait for a message, and for room in the socket when sending.
ANSWER_SECONDS = 5.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
_Place = tuple[socket.AddressFamily, tuple[Any, ...]]
_ANYWHERE: list[list[_Place]] = [[(socket.AF_INET6, ("::",))], [(socket.AF_INET, ("0.0.0.0",))]]
_LOOPBACK: list[list[_Place]] = [[(socket.AF_INET, ("127.0.0.1",))]]


class JsonConnection:
    """One connected socket.

    Attributes:
        peer: The socket.
        name: The other launcher in words, once it is known.
        index: Its number in the run, likewise.
        nonce: The random number that this side has sent.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.name = ""
        self.index = 0
        self.nonce = ""
        self._received = b""
        self._waiting: list[dict[str, Any]] = []  # came together with one that was waited for
        peer.settimeout(ANSWER_SECONDS)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            if hasattr(socket, option):  # macOS lacks some
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. If it cannot be sent, the next read finds the end of the connection."""
        try:
            self.peer.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def receive(self, flags: int = socket.MSG_DONTWAIT) -> tuple[list[dict[str, Any]], bool]:
        """Reads once: the complete messages, and whether more may come. Does not wait unless ``flags`` are 0."""
        try:
            data = self.peer.recv(LONGEST_MESSAGE, flags)
        except BlockingIOError:
            return [], True
        except OSError:
            return [], False
        *lines, self._received = (self._received + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # no launcher
            return [], False
        understood = [message for message in messages if isinstance(message, dict) and "event" in message]
        return understood, bool(data) and len(self._received) <= LONGEST_MESSAGE

    def receive_one(self, seconds: float) -> dict[str, Any] | None:
        """Waits for the next message; None if none comes in time."""
        deadline = time.monotonic() + seconds
        is_open = True
        while not self._waiting and is_open and time.monotonic() < deadline:
            messages, is_open = self.receive(flags=0)
            self._waiting += messages
        return self._waiting.pop(0) if self._waiting else None

    def take_waiting(self) -> list[dict[str, Any]]:
        """Returns the messages that came together with the one that :meth:`receive_one` returned."""
        messages, self._waiting = self._waiting, []
        return messages

    def close(self) -> None:
        """Closes the socket."""
        self.peer.close()


def listen(ports: list[int], address: str) -> list[socket.socket]:
    """Listens on the first of ``ports`` that is free, where others reach this machine by ``address``.

    That is every address of this machine that ``address`` stands for. If it stands for none (the machine is reached
    through another one), or for the loopback on this machine only, it is every address there is.

    Returns:
        One socket per address, which do not block; none if no port is free.
    """
    alternatives = _alternatives(address)
    for port in ports:
        for places in alternatives:
            listeners: list[socket.socket] = []
            try:
                for place in places:
                    listeners.append(_listener(place, port))
                return listeners
            except OSError:
                for listener in listeners:
                    listener.close()
    return []


def _alternatives(address: str) -> list[list[_Place]]:
    """Returns lists of addresses, the first that works counts."""
    if address in ("127.0.0.1", "localhost"):
        return _LOOPBACK
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return _ANYWHERE
    mine: list[_Place] = []
    for family, _, _, _, (host, _, *scope) in found:
        try:
            _listener((family, (host, *scope)), 0).close()
        except OSError:  # of another machine
            continue
        mine.append((family, (str(host), *scope)))
    # Names such as Debian's 127.0.1.1 lead other machines elsewhere.
    if not mine or any(_is_loopback(str(host)) for _, (host, *_) in mine):
        return _ANYWHERE
    return [mine]


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _listener(place: _Place, port: int) -> socket.socket:
    family, (host, *scope) = place
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port, *scope))
        listener.listen(128)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
