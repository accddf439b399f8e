"""Connects the launchers of one run, so that each is notified of failures on the others.

Rank 0's launcher is the hub: it listens, the others connect and introduce themselves. A launcher reports a failed rank
to the hub. The hub decides which failure was first and sends it to all launchers, so that every machine stops its ranks
and reports the same failure. A connection that closes without a message means that a launcher was lost.

The command that started the launchers by ssh connects only when it gets a signal, which the hub forwards to all.

The system probes silent connections (TCP keep-alive), so a machine that lost its power is noticed within about
15 seconds, while a launcher that is merely suspended is not taken for dead.

Each peer must answer the hub's challenge (:mod:`.handshake`) before anything it sends counts. Until then it can
neither block the hub nor end the run: reads do not block, and it is dropped after a few seconds.

A thread serves the sockets; :class:`LauncherLink` passes its messages to the launcher's loop.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import queue
import selectors
import signal
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from deepspeed.launcher.failures import Failure
from deepspeed.launcher.handshake import FRONT, HandshakeMessage, LauncherInfo, challenge, new_nonce, nonce_of
from deepspeed.launcher.resources import LauncherError
from deepspeed.logging import printable
from deepspeed.ports import why_not_reached

LONGEST_MESSAGE = 1 << 16
# The longest wait for a message, and for free space in the socket when sending.
REPLY_SECONDS = 5.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}
_Place = tuple[socket.AddressFamily, tuple[Any, ...]]
_ANYWHERE: list[list[_Place]] = [[(socket.AF_INET6, ("::",))], [(socket.AF_INET, ("0.0.0.0",))]]
_LOOPBACK: list[list[_Place]] = [[(socket.AF_INET, ("127.0.0.1",))]]


# The run's port, and the next ones if another program uses it; all launchers try them in this order.
_DISTANCE = 7000
_CANDIDATES = 8
_LOWEST_PORT = 1024
_RETRY_SECONDS = 0.3
_CONNECT_SECONDS = 2.0
# Interval at which waiting for another machine is logged.
_NOTICE_SECONDS = 30.0
# Connections that have not identified themselves; if there are more, the oldest is closed.
_MOST_UNNAMED = 64
_PAUSE_SECONDS = 0.05


class JsonConnection:
    """One connected socket."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer  # the socket
        self.name = ""  # description of the other launcher, once it is known
        self.index = 0  # its number in the run, once it is known
        self.nonce = ""  # the random number that this side has sent
        self._received = b""
        self._waiting: list[dict[str, Any]] = []  # messages that arrived together with an awaited one
        peer.settimeout(REPLY_SECONDS)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            if hasattr(socket, option):  # macOS lacks some
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. If that fails, the next read reports the end of the connection."""
        try:
            self.peer.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def receive(self, flags: int = socket.MSG_DONTWAIT) -> tuple[list[dict[str, Any]], bool]:
        """Reads once: returns the complete messages, and whether more may come. Blocks only if ``flags`` is 0."""
        try:
            data = self.peer.recv(LONGEST_MESSAGE, flags)
        except BlockingIOError:
            return [], True
        except OSError:
            return [], False
        *lines, self._received = (self._received + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # not a launcher
            return [], False
        understood = [message for message in messages if isinstance(message, dict) and "event" in message]
        return understood, bool(data) and len(self._received) <= LONGEST_MESSAGE

    def receive_one(self, seconds: float) -> dict[str, Any] | None:
        """Waits for the next message; returns None if none arrives in time."""
        deadline = time.monotonic() + seconds
        is_open = True
        while not self._waiting and is_open and time.monotonic() < deadline:
            messages, is_open = self.receive(flags=0)
            self._waiting += messages
        return self._waiting.pop(0) if self._waiting else None

    def take_waiting(self) -> list[dict[str, Any]]:
        """Returns the messages that arrived together with the one that :meth:`receive_one` returned."""
        messages, self._waiting = self._waiting, []
        return messages

    def close(self) -> None:
        """Closes the socket."""
        self.peer.close()


def listen(ports: list[int], address: str) -> list[socket.socket]:
    """Listens on the first of ``ports`` that is free, where others reach this machine by ``address``.

    Listens on every address of this machine to which ``address`` resolves. If there is none (the machine is reached
    through another one), or only the loopback address, listens on all addresses.

    Returns:
        One non-blocking socket per address; empty if no port is free.
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
    """Returns lists of addresses, of which the first that works is used."""
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
        except OSError:  # an address of another machine
            continue
        mine.append((family, (str(host), *scope)))
    # A name that resolves to Debian's 127.0.1.1 does not lead other machines here.
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


def link_ports(master_port: int) -> list[int]:
    """Returns the ports on which the hub may listen: ``DS_LINK_PORT``, or ports that follow from the master port.

    Raises:
        LauncherError: The variable is not a port number.
    """
    chosen = os.environ.get("DS_LINK_PORT", "").strip()
    if chosen:
        if not chosen.isdecimal() or not 0 < int(chosen) < 65536:
            raise LauncherError(f"DS_LINK_PORT: expected a port from 1 to 65535, found {chosen!r}; correct it")
        return [int(chosen)]
    first = master_port - _DISTANCE if master_port - _DISTANCE >= _LOWEST_PORT else master_port + _DISTANCE
    return [first + number for number in range(_CANDIDATES)]


class LauncherLink:
    """A launcher's connection to the others: sends its events and receives theirs.

    Events are dicts with ``event``: ``failed`` (to the hub: a :class:`~.failures.Failure` as a message), ``verdict``
    (from the hub: the same), ``signal`` (from the command that started the launchers, by way of the hub: its number),
    ``lost`` (who: description of a launcher), ``wrong`` (reason: the launchers do not belong together) and ``notice``
    (text: progress to print while waiting).
    """

    def __init__(self, me: LauncherInfo, address: str) -> None:
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
        self._connections: dict[int, JsonConnection] = {}
        self._gone: set[int] = set()  # launchers that left with a message
        self._unnamed: dict[JsonConnection, float] = {}  # deadlines of peers without a proof
        self._has_warned = False
        self._last_error: OSError | None = None  # latest error of connecting to the hub
        self._thread: threading.Thread | None = None

    @property
    def is_hub(self) -> bool:
        """Returns whether this launcher decides for all."""
        return self.me.index == 0

    @property
    def is_connected(self) -> bool:
        """Returns whether all receivers are connected: the hub; on the hub, every launcher that has not left."""
        if not self.is_hub:
            return 0 in self._connections
        return set(range(1, len(self.me.sizes))) <= self._connections.keys() | self._gone

    @property
    def waits_for_others(self) -> bool:
        """Returns whether launchers that have connected are still running; False on all launchers but the hub.

        Their last events can be read as soon as this is False.
        """
        return self.is_hub and self._is_serving and bool(set(self._connections) - self._gone - {FRONT})

    @property
    def missing(self) -> list[int]:
        """Returns the nodes whose launchers have not connected yet; empty on all launchers but the hub.

        They may be late, or not reach the hub's port. Empty, too, if the hub got no port.
        """
        if not (self.is_hub and self._is_serving):
            return []
        return sorted(set(range(1, len(self.me.sizes))) - set(self._connections) - self._gone)

    @property
    def _is_serving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def fileno(self) -> int:
        """Returns a descriptor that is readable when there are events."""
        return self._event_reader

    def start(self) -> None:
        """Starts to listen or to connect."""
        self._thread = threading.Thread(target=self._serve, name="deepspeed-link", daemon=True)
        self._thread.start()

    def send(self, **message: Any) -> None:
        """Sends an event to the hub; on the hub, to all launchers."""
        self._outgoing.put(message)
        _wake(self._wake_writer)

    def events(self) -> list[dict[str, Any]]:
        """Returns the events received since the last call."""
        _drain(self._event_reader)
        found = []
        while not self._events.empty():
            found.append(self._events.get_nowait())
        return found

    def close(self, patience: float) -> None:
        """Leaves and closes; for ``patience`` seconds, late launchers still connect and get earlier events."""
        if self._thread is None:
            return
        deadline = time.monotonic() + patience
        while not self.is_connected and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS / 10)
        self.send(event="bye")
        self._is_closing.set()
        _wake(self._wake_writer)
        self._thread.join(REPLY_SECONDS)
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
            for connection in (*self._connections.values(), *self._unnamed):
                connection.close()

    def _post(self, **event: Any) -> None:
        self._events.put(event)
        _wake(self._event_writer)

    def _listen(self, selector: selectors.BaseSelector) -> None:
        listeners = listen(self._ports, self._address)
        if not listeners:
            self._post(
                event="notice",
                text=f"no free port among {self._ports} for the connections between launchers: a failure on "
                "one machine will not stop the others at once; set DS_LINK_PORT to a free port on all "
                "machines",
            )
            return
        sent: list[dict[str, Any]] = []
        notice_at = time.monotonic() + _NOTICE_SECONDS
        with contextlib.ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener)
                selector.register(listener, selectors.EVENT_READ, listener)
            while not (self._is_closing.is_set() and self._outgoing.empty()):
                for key, _ in selector.select(_RETRY_SECONDS):
                    if isinstance(key.data, socket.socket):
                        self._accept(key.data, selector)
                    elif key.data in self._unnamed:
                        self._greet(key.data, selector, sent)
                    elif isinstance(key.data, JsonConnection) and self._connections.get(key.data.index) is key.data:
                        self._read_event(key.data, selector)
                now = time.monotonic()
                for connection in [each for each, deadline in self._unnamed.items() if deadline < now]:
                    self._drop(connection, selector)
                _drain(self._wake_reader)
                while not self._outgoing.empty():
                    sent.append(self._outgoing.get_nowait())
                    for connection in list(self._connections.values()):
                        connection.send(sent[-1])
                if time.monotonic() > notice_at and not self.is_connected:
                    self._post(
                        event="notice", text=f"still waiting for {launchers_of(self.missing)}: not connected yet"
                    )
                    notice_at += _NOTICE_SECONDS

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        """Sends a challenge to each new connection."""
        try:
            peer, _ = listener.accept()
        except OSError:  # it is closed already, or this process has too many open files
            time.sleep(_PAUSE_SECONDS)
            return
        if len(self._unnamed) >= _MOST_UNNAMED:
            self._drop(next(iter(self._unnamed)), selector)
        connection = JsonConnection(peer)
        connection.nonce = new_nonce()
        connection.send(challenge(connection.nonce))
        self._unnamed[connection] = time.monotonic() + REPLY_SECONDS
        selector.register(peer, selectors.EVENT_READ, connection)

    def _drop(
        self, connection: JsonConnection, selector: selectors.BaseSelector, answer: dict[str, Any] | None = None
    ) -> None:
        del self._unnamed[connection]
        selector.unregister(connection.peer)
        connection.send({"event": "refused"} if answer is None else answer)
        connection.close()

    def _greet(self, connection: JsonConnection, selector: selectors.BaseSelector, sent: list[dict[str, Any]]) -> None:
        """Reads the answer to the challenge. Admits a launcher of this run, and drops all other processes."""
        messages, is_open = connection.receive()
        if not messages:
            if not is_open:
                self._drop(connection, selector)
            return
        hello = HandshakeMessage.from_message(messages[0])
        if hello is None or hello.me.master_port != self.me.master_port or hello.me.run != self.me.run:
            self._drop(connection, selector)
            return
        if not self.me.is_genuine(messages[0], connection.nonce):
            self._drop(connection, selector)
            self._warn(
                f"refused a process on host {hello.me.host} that calls itself the launcher of node {hello.me.index}, "
                "but does not have the secret of this run. If it is one of this run, give all launchers the same "
                "DS_RUN_SECRET"
            )
            return
        index, host = hello.me.index, hello.me.host
        reason = self._mismatch(hello.me)
        if reason is not None:
            self._post(event="wrong", reason=reason)
            self._drop(connection, selector, self.me.signed({"event": "wrong", "reason": reason}, hello.nonce))
            return
        del self._unnamed[connection]
        connection.name, connection.index = self.me.name_of(index, host), index
        self._connections[index] = connection
        connection.send(self.me.signed({"event": "welcome", "host": self.me.host}, hello.nonce))
        for message in sent:
            connection.send(message)
        self._pass_on(connection, messages[1:])
        if not is_open:
            self._end(connection, selector)

    def _warn(self, text: str) -> None:
        """Warns of a process that is not part of the run; only once, as there may be many."""
        if not self._has_warned:
            self._has_warned = True
            self._post(event="notice", text=text)

    def _mismatch(self, other: LauncherInfo) -> str | None:
        """Returns why a launcher does not belong to this run; None if it does."""
        index, host, sizes = other.index, other.host, other.sizes
        if sizes != self.me.sizes:
            return (
                f"the launchers disagree about the run: host {self.me.host} (node 0) counts {list(self.me.sizes)} "
                f"ranks per node, host {host} (node {index}) {list(sizes)}; start all with the same host file and "
                "options"
            )
        if index == FRONT and not self.me.secret:
            return f"host {host} sends signals to a run without a secret: start its launchers by the deepspeed command"
        if not 0 <= index < len(sizes) and index != FRONT:
            return f"--node_rank {index} of host {host}: expected 0 to {len(sizes) - 1}; give every machine its own"
        if index in self._connections or index in self._gone or index == 0:
            other_name = self._connections[index].name if index in self._connections else f"node {index}"
            return f"--node_rank {index} is used twice: by {other_name} and by host {host}; give every machine its own"
        if other.version != self.me.version:
            return (
                f"host {self.me.host} (node 0) has version {self.me.version} of this package, host {host} "
                f"(node {index}) {other.version}; install the same on all machines"
            )
        return None

    def _read_event(self, connection: JsonConnection, selector: selectors.BaseSelector) -> bool:
        """Forwards a launcher's messages; returns False when the connection has ended."""
        messages, is_open = connection.receive()
        self._pass_on(connection, messages)
        if not is_open:
            self._end(connection, selector)
        return is_open

    def _end(self, connection: JsonConnection, selector: selectors.BaseSelector) -> None:
        selector.unregister(connection.peer)
        connection.close()
        if connection.index not in self._gone and connection.index != FRONT and not self._is_closing.is_set():
            self._post(event="lost", who=connection.name)
            self._gone.add(connection.index)
        del self._connections[connection.index]

    def _pass_on(self, connection: JsonConnection, messages: list[dict[str, Any]]) -> None:
        for message in messages:
            if message["event"] == "bye":
                self._gone.update({connection.index} - {FRONT})
                continue
            if message["event"] == "signal" and connection.index == (FRONT if self.is_hub else 0):
                self._pass_on_signal(connection, message.get("signal"))
                continue
            try:
                if message["event"] != ("failed" if self.is_hub else "verdict"):
                    raise ValueError(f"unexpected event {message['event']!r}")
                Failure.from_message(message)
            except ValueError as error:
                self._post(event="notice", text=printable(f"ignored a message of {connection.name}: {error}"))
            else:
                self._post(**message)

    def _pass_on_signal(self, connection: JsonConnection, number: object) -> None:
        if number not in {int(each) for each in signal.Signals}:
            self._post(event="notice", text=printable(f"ignored a message of {connection.name}: signal {number!r}"))
            return
        if self.is_hub:
            self.send(event="signal", signal=number)
        self._post(event="signal", signal=number)

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
                    is_open = self._read_event(connection, selector)
            _drain(self._wake_reader)
            while is_open and not self._outgoing.empty():
                connection.send(self._outgoing.get_nowait())

    def _find_hub(self) -> JsonConnection | None:
        """Connects to the hub of this run; None if stopped meanwhile, or refused."""
        notice_at = time.monotonic() + _NOTICE_SECONDS
        while not self._is_closing.is_set():
            for port in self._ports:
                connection, answer = self._try(port)
                if answer is not None and answer["event"] == "welcome":
                    assert connection is not None
                    connection.name = self.me.name_of(0, answer.get("host", self._address))
                    return connection
                if connection is not None:
                    connection.close()
                if answer is not None and answer["event"] == "wrong":
                    self._post(event="wrong", reason=answer.get("reason", "node 0 refused this launcher"))
                    return None
            if time.monotonic() > notice_at:
                ports = f"{self._ports[0]} to {self._ports[-1]}" if len(self._ports) > 1 else f"{self._ports[0]}"
                self._post(
                    event="notice",
                    text=f"still no launcher of node 0 at {self._address}, ports {ports}: has it been started, and "
                    f"does a firewall let these through? (DS_LINK_PORT chooses one){self._why_unreached()}",
                )
                notice_at += _NOTICE_SECONDS
            self._is_closing.wait(_RETRY_SECONDS)
        return None

    def _why_unreached(self) -> str:
        if self._last_error is None:
            return ""
        return f" The last attempt failed: {why_not_reached(self._address, self._last_error)}"

    def _try(self, port: int) -> tuple[JsonConnection | None, dict[str, Any] | None]:
        """Connects to ``port``: (the connection or None, its answer or None)."""
        try:
            peer = socket.create_connection((self._address, port), timeout=_CONNECT_SECONDS)
        except OSError as error:  # not there yet
            self._last_error = error
            return None, None
        if peer.getsockname() == peer.getpeername():  # TCP can connect a port to itself on one machine
            peer.close()
            return None, None
        connection = JsonConnection(peer)
        hub_nonce = nonce_of(connection.receive_one(REPLY_SECONDS))
        if hub_nonce is None:
            return connection, None
        nonce = new_nonce()
        connection.send(self.me.hello(hub_nonce, nonce))
        answer = connection.receive_one(REPLY_SECONDS)
        if answer is None or answer["event"] not in ("welcome", "wrong"):
            return connection, None
        if not self.me.is_genuine(answer, nonce):
            self._warn(
                f"the program at {self._address}, port {port}, does not have the secret of this run. If it is the "
                "launcher of node 0, give all launchers the same DS_RUN_SECRET"
            )
            return connection, None
        return connection, {name: printable(str(value)) for name, value in answer.items()}


def launchers_of(nodes: Sequence[int]) -> str:
    """Returns a description of the launchers of these nodes."""
    listed = ", ".join(map(str, nodes[:16])) + (", ..." if len(nodes) > 16 else "")
    return f"the launcher(s) of node(s) {listed}"


def _wake(writer: int) -> None:
    try:
        os.write(writer, b"x")
    except BlockingIOError:  # full: the reader will wake up anyway
        return


def _drain(reader: int) -> None:
    try:
        while os.read(reader, 4096):
            continue
    except BlockingIOError:
        return
