"""Strangers at the sockets through which ranks of one host find each other."""

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepspeed.comm.host import sockets as meeting
from deepspeed.comm.host.shared_memory import _new_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has sockets without names in a file system")

TOKEN = b"t" * 16


class Listener:
    """Rank 0 of three ranks, which waits for the two others."""

    def __init__(self):
        self.address = f"\0deepspeed-test-{secrets.token_hex(8)}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(self.address)
        self.socket.listen(8)
        self._pool = ThreadPoolExecutor(1)
        self.outcome = self._pool.submit(meeting._answer, self.socket, {1, 2}, TOKEN)
        self.kept = []

    def stranger(self, text=None):
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.connect(self.address)
        if text is not None:
            made.send(text)
        self.kept.append(made)
        return made

    def rank(self, rank):
        self.kept.append(meeting._call(self.address, rank, TOKEN))
        return self.kept[-1]


@pytest.fixture
def listener():
    made = Listener()
    yield made
    made.socket.close()
    for each in made.kept:
        each.close()


@pytest.mark.parametrize(
    "text",
    [
        None,
        b"x",
        struct.pack("=q", 1),
        struct.pack("=q16s", 1, b"guessed"),
        struct.pack("=q16s", 1, TOKEN) + b"more",
        *(struct.pack("=q16s", rank, TOKEN) for rank in (0, -1, 3, 1 << 40)),
    ],
)
def test_a_stranger_is_dropped_and_holds_nobody_up(listener, text):
    listener.stranger(text)
    ended = listener.stranger()
    ended.close()
    own = {rank: listener.rank(rank) for rank in (2, 1)}
    found = listener.outcome.result(5)
    assert sorted(found) == [1, 2]
    for rank, connection in found.items():
        own[rank].send(b"from rank %d" % rank)
        assert connection.recv(64) == b"from rank %d" % rank
        connection.close()


def test_strangers_that_keep_connecting_win_no_time(monkeypatch):
    monkeypatch.setattr(meeting, "_MEETING", 0.5)
    listener = Listener()
    until = time.monotonic() + 5
    while not listener.outcome.done() and time.monotonic() < until:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger, contextlib.suppress(OSError):
            stranger.settimeout(0.1)  # nobody takes it any more once the wait has ended
            stranger.connect(listener.address)
            stranger.send(b"x")
    listener.socket.close()
    with pytest.raises(TimeoutError, match="did not connect in time"):
        listener.outcome.result(0)


def test_the_first_of_two_processes_with_one_rank_counts(listener):
    first, second = listener.rank(1), listener.rank(1)
    listener.rank(2)
    found = listener.outcome.result(5)
    first.send(b"first")
    assert found[1].recv(64) == b"first"
    assert second.recv(64) == b""
    for connection in found.values():
        connection.close()


def test_a_process_of_another_user_is_refused_on_both_sides(listener, monkeypatch):
    listener.stranger(struct.pack("=q16s", 1, TOKEN))
    assert meeting._is_mine(listener.kept[-1])
    foreign = threading.local()
    is_mine = meeting._is_mine
    monkeypatch.setattr(meeting, "_is_mine", lambda made: is_mine(made) and not getattr(foreign, "here", False))
    foreign.here = True
    with pytest.raises(PermissionError, match="belongs to another user"):
        meeting._call(listener.address, 2, TOKEN)
    foreign.here = False
    monkeypatch.setattr(meeting.os, "geteuid", lambda: os.getuid() + 1)
    assert not meeting._is_mine(listener.kept[-1])
    monkeypatch.undo()
    listener.rank(2)
    for connection in listener.outcome.result(5).values():
        connection.close()


def test_ranks_that_do_not_come_are_an_oserror_that_leaves_nothing_open(monkeypatch):
    monkeypatch.setattr(meeting, "_MEETING", 0.2)
    listener = Listener()
    own = listener.rank(1)
    with pytest.raises(TimeoutError):
        listener.outcome.result(5)
    assert own.recv(1) == b""
    listener.socket.close()
    own.close()


def test_memory_for_other_ranks_can_grow_and_not_shrink():
    file = _new_memory()
    os.ftruncate(file, 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(file, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    os.close(file)
