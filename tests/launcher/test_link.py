"""The launchers' connections, with fake clients: what strangers send neither ends a run nor stops the hub."""

import json
import socket
import time
from dataclasses import replace

import pytest

from deepspeed.launcher import link
from deepspeed.launcher.failures import Failure
from deepspeed.launcher.handshake import LauncherInfo
from deepspeed.launcher.link import JsonConnection, LauncherLink, listen
from deepspeed.ports import free_port

ME = LauncherInfo(0, "hub", (1, 1, 1), 29500, "1.0", "run x", "the secret")
FAILURE = Failure("rank 1 failed", 3, rank=1)


class Hub:
    """A hub on the loopback."""

    def __init__(self, me: LauncherInfo = ME) -> None:
        self.me = me
        self.link = LauncherLink(me, "127.0.0.1")
        self.link._ports = [free_port()]
        self.link.start()
        self._kept: list[JsonConnection] = []

    def dial(self) -> socket.socket:
        """Connects, as soon as the hub listens."""
        for _ in range(6000):
            try:
                return socket.create_connection(("127.0.0.1", self.link._ports[0]), timeout=60)
            except OSError:
                time.sleep(0.01)
        raise AssertionError("the hub does not listen")

    def greet(self, who: LauncherInfo, **changes: object) -> tuple[JsonConnection, dict | None]:
        """Answers the challenge as ``who``, with ``changes`` to the hello; returns the hub's answer."""
        connection = JsonConnection(self.dial())
        hello = who.hello(connection.receive_one(60)["nonce"], "mine")
        connection.send({**hello, **changes})
        return connection, connection.receive_one(60)

    def hears(self, count: int = 1) -> list[dict]:
        """The next events."""
        found: list[dict] = []
        deadline = time.monotonic() + 60
        while len(found) < count and time.monotonic() < deadline:
            found += self.link.events()
            time.sleep(0.005)
        return found

    def serves(self, index: int) -> JsonConnection:
        """Takes in a launcher of the run: the hub is there, waits for nobody and has not ended the run."""
        connection, answer = self.greet(replace(self.me, index=index))
        assert answer is not None and answer["event"] == "welcome", answer
        assert self.me.is_genuine(answer, "mine")
        self._kept.append(connection)
        return connection


@pytest.fixture
def hub():
    made = Hub()
    yield made
    made.link.close(0)


@pytest.mark.parametrize(
    "sent",
    [
        b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b"7\n", b"null\n", b'{"event": 1}\n', b"\xff\xfe\n",
        b"{" * 70_000, b"[" * 60_000 + b"\n", b'{"event": "hello"}\n',
        b'{"event": "hello", "magic": "deepspeed launcher"}\n', b'{"event": "failed", "sentence": "no"}\n',
        b'{"event": "bye"}\n',
    ],
)  # fmt: skip
def test_what_is_no_hello_is_dropped(hub, sent):
    stranger = hub.dial()
    stranger.sendall(sent)
    stranger.shutdown(socket.SHUT_WR)
    hub.serves(1)
    assert hub.link.events() == []


WRONG = [[], {}, None, "1", 1.5, True, -1, 99]


@pytest.mark.parametrize("name", ["index", "host", "sizes", "master_port", "version", "run"])
def test_a_hello_with_a_wrong_value_is_refused_and_ends_nothing(hub, name):
    for value in WRONG:
        _, answer = hub.greet(replace(ME, index=1), **{name: value})  # also: its proof is of other values
        assert answer == {"event": "refused"}, value
    missing = replace(ME, index=1).hello("", "mine")
    del missing[name]
    connection = JsonConnection(hub.dial())
    connection.receive_one(60)
    connection.send(missing)
    assert connection.receive_one(60) == {"event": "refused"}
    hub.serves(1)
    assert {event["event"] for event in hub.link.events()} <= {"notice"}


@pytest.mark.parametrize("name", ["index", "host", "sizes", "version"])
def test_without_a_secret_malformed_hellos_end_nothing_either(name):
    hub = Hub(replace(ME, secret="", run=""))
    for value in (v for v in WRONG if not (name == "index" and type(v) is int) and not (name == "sizes" and v == [])):
        if not (isinstance(value, str) and name in ("host", "version")):
            assert hub.greet(replace(hub.me, index=1), **{name: value})[1] == {"event": "refused"}, value
    hub.serves(1)
    assert hub.link.events() == []
    hub.link.close(0)


@pytest.mark.parametrize(
    "who",
    [
        replace(ME, index=1, secret=""),
        replace(ME, index=1, secret="another"),
        replace(ME, index=1, secret="another", sizes=(2, 2, 2)),
        replace(ME, index=1, run=""),
        replace(ME, index=1, run="run y"),
        replace(ME, index=1, master_port=29501),
    ],
)
def test_connections_without_the_secret_or_of_another_run_are_refused(hub, who):
    assert hub.greet(who)[1] == {"event": "refused"}
    hub.serves(1)
    events = hub.link.events()
    kinds = [event["event"] for event in events]
    assert kinds == ["notice"] * (who.run == ME.run and who.master_port == ME.master_port)
    assert not events or "does not have the secret of this run" in events[0]["text"]


def test_a_proof_of_another_challenge_is_worth_nothing(hub):
    heard = replace(ME, index=1).hello("an earlier challenge", "mine")
    connection = JsonConnection(hub.dial())
    connection.receive_one(60)
    connection.send(heard)
    assert connection.receive_one(60) == {"event": "refused"}


def test_silent_clients_hold_nobody_up_and_are_dropped(hub, monkeypatch):
    monkeypatch.setattr(link, "REPLY_SECONDS", 0.2)
    silent = [hub.dial() for _ in range(link._MOST_UNNAMED + 5)]
    slow = hub.dial()
    slow.sendall(b'{"event"')
    hub.serves(1)
    for stranger in (*silent, slow):
        stranger.settimeout(60)
        while stranger.recv(4096):
            continue
    hub.serves(2)
    assert hub.link.events() == []


def test_the_secret_is_never_sent():
    assert "the secret" not in repr(ME) + json.dumps(ME.hello("nonce", "mine")) + json.dumps(ME.signed({"a": 1}, "n"))


@pytest.mark.parametrize(
    "changes",
    [
        {"sentence": None}, {"exit_code": "1"}, {"exit_code": 1000}, {"rank": [1]}, {"age": "x"}, {"age": -1},
        {"lost_a_peer": 1}, {"event": "verdict"}, {"event": "lost"}, {"event": "notice"}, {"event": ["failed"]},
    ],
)  # fmt: skip
def test_a_malformed_message_of_a_launcher_is_ignored(hub, changes):
    connection = hub.serves(1)
    connection.send({"event": "failed", **FAILURE.to_message(), **changes})
    connection.send({"event": "failed", **FAILURE.to_message()})
    ignored, failed = hub.hears(2)
    assert ignored["event"] == "notice" and "ignored a message of node 1 (rank 1, host hub)" in ignored["text"]
    assert Failure.from_message(failed).sentence == "rank 1 failed"


def test_text_of_others_cannot_control_the_terminal():
    message = replace(FAILURE, sentence="rank 1 \x1b[2J failed\n\tat a\x9b").to_message()
    assert Failure.from_message(message).sentence == "rank 1 ?[2J failed\n\tat a?"
    hub = Hub(replace(ME, secret=""))
    hub.greet(replace(hub.me, index=1, host="evil\x1b]0;title\x07\nhost", sizes=(9, 9, 9)))
    (wrong,) = hub.hears()
    assert wrong["event"] == "wrong" and "host evil?]0;title??host (node 1)" in wrong["reason"]
    hub.link.close(0)


def test_a_hub_waits_for_launchers_that_are_connected_and_names_the_others(hub):
    assert not hub.link.waits_for_others and hub.link.missing == [1, 2]
    connection = hub.serves(1)
    assert hub.link.waits_for_others and hub.link.missing == [2]
    connection.send({"event": "bye"})
    deadline = time.monotonic() + 60
    while hub.link.waits_for_others and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not hub.link.waits_for_others and hub.link.missing == [2]


def test_a_hub_whose_port_another_program_uses_waits_for_nobody():
    with socket.create_server(("127.0.0.1", 0)) as other:
        made = LauncherLink(ME, "127.0.0.1")
        made._ports = [other.getsockname()[1]]
        made.start()
        assert made._thread is not None
        made._thread.join(60)
        assert not made.waits_for_others and made.missing == []
        (notice,) = made.events()
        assert "no free port among" in notice["text"]
        made.close(0)


def test_launchers_of_one_run_hear_of_each_other_and_not_of_an_impostor():
    """The ports are tried in order; on the first one listens somebody without the secret."""
    impostor, hub = Hub(replace(ME, secret="guessed")), Hub()
    other = LauncherLink(replace(ME, index=1), "127.0.0.1")
    other._ports = [*impostor.link._ports, *hub.link._ports]
    other.start()
    deadline = time.monotonic() + 60
    while not other.is_connected and time.monotonic() < deadline:
        time.sleep(0.01)
    impostor.link.send(event="verdict", **replace(FAILURE, sentence="a lie").to_message())
    other.send(event="failed", **FAILURE.to_message())
    (failed,) = hub.hears()
    hub.link.send(event="verdict", **FAILURE.to_message())
    while not (events := [event for event in other.events() if event["event"] != "notice"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert failed["sentence"] == "rank 1 failed" and [event["sentence"] for event in events] == ["rank 1 failed"]
    for each in (other, impostor.link, hub.link):
        each.close(0)


def test_the_hub_listens_where_the_others_reach_it(monkeypatch):
    mine = {"interface": "127.0.0.2", "debian": "127.0.1.1", "translated": "192.0.2.1"}
    monkeypatch.setattr(
        link.socket, "getaddrinfo", lambda host, *_, **__: [(socket.AF_INET, 0, 0, "", (mine[host], 0))]
    )
    is_loopback = link._is_loopback
    monkeypatch.setattr(link, "_is_loopback", lambda host: host != "127.0.0.2" and is_loopback(host))
    everywhere = {"::", "0.0.0.0"}
    for address, expected in (
        ("interface", {"127.0.0.2"}), ("debian", everywhere), ("translated", everywhere), ("localhost", {"127.0.0.1"})
    ):  # fmt: skip
        (listener,) = listen([free_port()], address)
        assert listener.getsockname()[0] in expected
        listener.close()


def test_a_launcher_that_cannot_resolve_the_first_machine_logs_it_and_continues(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(link, "_NOTICE_SECONDS", 0.0)
    other = LauncherLink(replace(ME, index=1, host="other"), "machine0")
    other.start()
    try:
        while not (events := other.events()):
            time.sleep(0.005)
        assert events[0]["event"] == "notice"
        assert f"host {socket.gethostname()} cannot resolve the name machine0" in events[0]["text"]
    finally:
        other.close(0)
