"""How the launchers of one run hear of each other.

Rank 0's launcher is the hub: it listens, the others connect and introduce themselves. Whoever sees a rank fail tells
the hub; the hub decides which failure was first and tells everybody, so that every machine stops its ranks and reports
the same. A connection that ends without a word means that a launcher was lost, with its machine or without.

The system probes silent connections (TCP keep-alive), so a machine that lost its power is noticed within about
15 seconds, while a launcher that is merely suspended is not taken for dead.

A thread serves the sockets; :class:`Link` hands its messages over to the launcher's own loop.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from deepspeed.launcher.resources import LauncherError

# A run's own port, and the next ones should another program have taken it; all launchers try them in this order.
_DISTANCE = 7000
_CANDIDATES = 8
_LOWEST_PORT = 1024
_RETRY_SECONDS = 0.3
_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
# Waiting for another machine is worth a line after this long, again and again.
_IMPATIENT_SECONDS = 30.0
_LONGEST_MESSAGE = 1 << 16
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
_MAGIC = "deepspeed launcher"


@dataclass(frozen=True)
class Introduction:
    """What one launcher tells the hub about itself.

    Attributes:
        index: Number of the launcher in the run; 0 is the hub.
        host: Its machine.
        sizes: Ranks that each launcher of the run starts.
        master_port: Where the ranks meet; tells runs on the same machines apart.
        version: Of this package.
        run: Name of the run; empty where its launchers were started by hand.
    """

    index: int
    host: str
    sizes: tuple[int, ...]
    master_port: int
    version: str
    run: str = ""

    def to_message(self) -> dict[str, Any]:
        """As JSON can carry it."""
        return {"event": "hello", "magic": _MAGIC, **vars(self), "sizes": list(self.sizes)}

    def name_of(self, index: int, host: str) -> str:
        """One launcher and its ranks in words."""
        first = sum(self.sizes[:index])
        last = first + self.sizes[index] - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"node {index} ({ranks}, host {host})"


def link_ports(master_port: int) -> list[int]:
    """Where the hub of a run may listen: ``DS_LINK_PORT``, or ports that follow from the master port.

    Raises:
        LauncherError: The variable is no port.
    """
    chosen = os.environ.get("DS_LINK_PORT", "").strip()
    if chosen:
        if not chosen.isdecimal() or not 0 < int(chosen) < 65536:
            raise LauncherError(f"DS_LINK_PORT must be a port from 1 to 65535, but is {chosen!r}; correct the variable")
        return [int(chosen)]
    first = master_port - _DISTANCE if master_port - _DISTANCE >= _LOWEST_PORT else master_port + _DISTANCE
    return [first + number for number in range(_CANDIDATES)]


class Link:
    """The launcher's side of the connection to the others: what it says and what it hears.

    Events are dicts with ``event``: ``failed`` (to the hub: a :class:`~.failures.Failure` as a message), ``verdict``
    (from the hub: the same), ``lost`` (who: a launcher in words), ``wrong`` (reason: the launchers do not belong
    together) and ``notice`` (text: something that may interest whoever waits).

    Args:
        me: This launcher.
        address: Where the hub is reached.
    """

    def __init__(self, me: Introduction, address: str) -> None:
        self.me = me
        self._address = address
        self._ports = link_ports(me.master_port)
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._event_reader, self._event_writer = os.pipe()
        self._wake_reader, self._wake_writer = os.pipe()
        for end in (self._event_reader, self._event_writer, self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)
        self._is_closing = threading.Event()
        self._connections: dict[int, _Connection] = {}
        self._gone: set[int] = set()  # those who said good-bye
        self._thread: threading.Thread | None = None

    @property
    def is_hub(self) -> bool:
        """Whether this launcher decides for all."""
        return self.me.index == 0

    @property
    def is_connected(self) -> bool:
        """Whether those who must hear us can: the hub, or for the hub everybody who is still at work."""
        if not self.is_hub:
            return 0 in self._connections
        return set(range(1, len(self.me.sizes))) <= self._connections.keys() | self._gone

    @property
    def waits_for_others(self) -> bool:
        """Whether launchers of the run are still at work (only the hub knows)."""
        return self.is_hub and len(self._gone) < len(self.me.sizes) - 1

    def fileno(self) -> int:
        """Becomes readable when there are events."""
        return self._event_reader

    def start(self) -> None:
        """Starts to listen or to connect."""
        self._thread = threading.Thread(target=self._serve, name="deepspeed-link", daemon=True)
        self._thread.start()

    def send(self, **message: Any) -> None:
        """Tells the hub, or as the hub everybody."""
        self._outgoing.put(message)
        _wake(self._wake_writer)

    def events(self) -> list[dict[str, Any]]:
        """What was heard since the last call."""
        _drain(self._event_reader)
        found = []
        while not self._events.empty():
            found.append(self._events.get_nowait())
        return found

    def close(self, patience: float) -> None:
        """Says good-bye and hangs up.

        Args:
            patience: Seconds in which those who are not connected yet may still come and hear what was sent.
        """
        if self._thread is None:
            return
        deadline = time.monotonic() + patience
        while not self.is_connected and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS / 10)
        self.send(event="bye")
        self._is_closing.set()
        _wake(self._wake_writer)
        self._thread.join(_ANSWER_SECONDS)
        for end in (self._event_reader, self._event_writer, self._wake_reader, self._wake_writer):
            os.close(end)

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_reader, selectors.EVENT_READ)
                if self.is_hub:
                    self._listen(selector)
                else:
                    self._connect(selector)
        finally:
            for connection in list(self._connections.values()):
                connection.close()

    def _post(self, **event: Any) -> None:
        self._events.put(event)
        _wake(self._event_writer)

    def _listen(self, selector: selectors.BaseSelector) -> None:
        listener = _bind(self._ports, self._address)
        if listener is None:
            self._post(
                event="notice",
                text=f"no free port among {self._ports} for the launchers to hear of each other: a failure on one "
                "machine will not stop the others at once; set DS_LINK_PORT to a free port on all machines",
            )
            return
        sent: list[dict[str, Any]] = []
        impatient_at = time.monotonic() + _IMPATIENT_SECONDS
        with listener:
            selector.register(listener, selectors.EVENT_READ)
            while not (self._is_closing.is_set() and self._outgoing.empty()):
                for key, _ in selector.select(_RETRY_SECONDS):
                    if key.fileobj is listener:
                        self._welcome(listener.accept()[0], selector, sent)
                    elif isinstance(key.data, _Connection):
                        self._hear(key.data, selector)
                _drain(self._wake_reader)
                while not self._outgoing.empty():
                    sent.append(self._outgoing.get_nowait())
                    for connection in list(self._connections.values()):
                        connection.send(sent[-1])
                if time.monotonic() > impatient_at and not self.is_connected:
                    self._complain_of_absence()
                    impatient_at += _IMPATIENT_SECONDS

    def _complain_of_absence(self) -> None:
        missing = sorted(set(range(1, len(self.me.sizes))) - self._connections.keys() - self._gone)
        listed = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        self._post(event="notice", text=f"still waiting for the launcher(s) of node(s) {listed}: not heard of yet")

    def _welcome(self, peer: socket.socket, selector: selectors.BaseSelector, sent: list[dict[str, Any]]) -> None:
        """Takes in a launcher, or sends whatever connected away."""
        connection = _Connection(peer)
        hello = connection.receive_one(_ANSWER_SECONDS)
        if hello is None or hello.get("magic") != _MAGIC or self._is_of_another_run(hello):
            connection.send({"event": "refused"})
            connection.close()
            return
        index, host = hello["index"], hello["host"]
        reason = self._mismatch(hello)
        if reason is not None:
            self._post(event="wrong", reason=reason)
            connection.send({"event": "wrong", "reason": reason})
            connection.close()
            return
        connection.name = self.me.name_of(index, host)
        connection.index = index
        self._connections[index] = connection
        connection.send({"event": "welcome", "host": self.me.host})
        for message in sent:
            connection.send(message)
        selector.register(peer, selectors.EVENT_READ, connection)
        self._pass_on(connection, connection.take_waiting())

    def _is_of_another_run(self, hello: dict[str, Any]) -> bool:
        return hello.get("master_port") != self.me.master_port or hello.get("run", self.me.run) != self.me.run

    def _mismatch(self, hello: dict[str, Any]) -> str | None:
        """Why a launcher does not belong to this run; None if it does."""
        index, host, sizes = hello["index"], hello["host"], tuple(hello["sizes"])
        if sizes != self.me.sizes:
            return (
                f"the launchers disagree about the run: host {self.me.host} (node 0) counts {list(self.me.sizes)} "
                f"ranks per node, host {host} (node {index}) {list(sizes)}; start all with the same host file and "
                "options"
            )
        if index in self._connections or index in self._gone or index == 0:
            other = self._connections[index].name if index in self._connections else f"node {index}"
            return f"--node_rank {index} is used twice: by {other} and by host {host}; give every machine its own"
        if hello["version"] != self.me.version:
            return (
                f"host {self.me.host} (node 0) has version {self.me.version} of this package, host {host} "
                f"(node {index}) {hello['version']}; install the same on all machines"
            )
        return None

    def _hear(self, connection: _Connection, selector: selectors.BaseSelector) -> bool:
        """Passes on what a launcher says; False at its end."""
        messages, is_open = connection.receive()
        self._pass_on(connection, messages)
        if not is_open:
            selector.unregister(connection.peer)
            connection.close()
            del self._connections[connection.index]
            if connection.index not in self._gone and not self._is_closing.is_set():
                self._gone.add(connection.index)
                self._post(event="lost", who=connection.name)
        return is_open

    def _pass_on(self, connection: _Connection, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if message["event"] == "bye":
                self._gone.add(connection.index)
            else:
                self._post(**message)

    def _connect(self, selector: selectors.BaseSelector) -> None:
        connection = self._find_hub()
        if connection is None:
            return
        self._connections[0] = connection
        selector.register(connection.peer, selectors.EVENT_READ, connection)
        self._pass_on(connection, connection.take_waiting())
        is_open = True
        while is_open and not (self._is_closing.is_set() and self._outgoing.empty()):
            for key, _ in selector.select(_RETRY_SECONDS):
                if key.data is connection:
                    is_open = self._hear(connection, selector)
            _drain(self._wake_reader)
            while is_open and not self._outgoing.empty():
                connection.send(self._outgoing.get_nowait())

    def _find_hub(self) -> _Connection | None:
        """Connects to the hub of this run; None when told to stop meanwhile, or that we do not belong to it."""
        impatient_at = time.monotonic() + _IMPATIENT_SECONDS
        while not self._is_closing.is_set():
            for port in self._ports:
                connection, answer = self._try(port)
                if answer is not None and answer["event"] == "welcome":
                    assert connection is not None
                    connection.name = self.me.name_of(0, answer["host"])
                    return connection
                if connection is not None:
                    connection.close()
                if answer is not None and answer["event"] == "wrong":
                    self._post(**answer)
                    return None
            if time.monotonic() > impatient_at:
                ports = f"{self._ports[0]} to {self._ports[-1]}" if len(self._ports) > 1 else f"{self._ports[0]}"
                self._post(
                    event="notice",
                    text=f"still no launcher of node 0 at {self._address}, ports {ports}: has it been started, and "
                    "does a firewall let these through? (DS_LINK_PORT chooses one)",
                )
                impatient_at += _IMPATIENT_SECONDS
            self._is_closing.wait(_RETRY_SECONDS)
        return None

    def _try(self, port: int) -> tuple[_Connection | None, dict[str, Any] | None]:
        try:
            peer = socket.create_connection((self._address, port), timeout=_CONNECT_SECONDS)
        except OSError:  # not there yet
            return None, None
        if peer.getsockname() == peer.getpeername():  # both ends at once: TCP allows it on one machine
            peer.close()
            return None, None
        connection = _Connection(peer)
        connection.send(self.me.to_message())
        return connection, connection.receive_one(_ANSWER_SECONDS)


class _Connection:
    """One socket that carries JSON objects, one per line."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.name = ""
        self.index = 0
        self._received = b""
        self._waiting: list[dict[str, Any]] = []  # came together with one that was waited for
        peer.settimeout(_ANSWER_SECONDS)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            if hasattr(socket, option):  # macOS lacks some
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message; one that cannot be sent is for a launcher whose end will be noticed when reading."""
        try:
            self.peer.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Reads once: the complete messages, and whether more may come."""
        try:
            data = self.peer.recv(_LONGEST_MESSAGE)
        except OSError:
            return [], False
        *lines, self._received = (self._received + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return [], False  # not one of us
        understood = [message for message in messages if isinstance(message, dict) and "event" in message]
        return understood, bool(data) and len(self._received) <= _LONGEST_MESSAGE

    def receive_one(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None if none comes in time."""
        deadline = time.monotonic() + seconds
        is_open = True
        while not self._waiting and is_open and time.monotonic() < deadline:
            messages, is_open = self.receive()
            self._waiting += messages
        return self._waiting.pop(0) if self._waiting else None

    def take_waiting(self) -> list[dict[str, Any]]:
        """The messages that came together with the one that :meth:`receive_one` returned."""
        messages, self._waiting = self._waiting, []
        return messages

    def close(self) -> None:
        """Hangs up."""
        self.peer.close()


def _bind(ports: list[int], address: str) -> socket.socket | None:
    """Listens on the first port that is free: for this machine only where that is enough."""
    places = [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]
    if address in ("127.0.0.1", "localhost"):
        places = [(socket.AF_INET, "127.0.0.1")]
    for port in ports:
        for family, anywhere in places:
            listener = None
            try:
                listener = socket.socket(family, socket.SOCK_STREAM)
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                listener.bind((anywhere, port))
                listener.listen(128)
                return listener
            except OSError:
                if listener is not None:
                    listener.close()
    return None


def _wake(writer: int) -> None:
    try:
        os.write(writer, b"x")
    except BlockingIOError:  # full: the reader has enough to wake up for
        return


def _drain(reader: int) -> None:
    try:
        while os.read(reader, 4096):
            continue
    except BlockingIOError:
        return
