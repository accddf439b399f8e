"""A rank that waits for one whose program has ended is told so, at once."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as torch_dist

from deepspeed.comm.watch import Watch
from deepspeed.errors import CommunicationError

BROKEN = "[/src/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:99. This is typically caused by bad luck."


def pair_of_watches():
    store, aborted = torch_dist.HashStore(), threading.Event()
    return aborted, [Watch(store, "here", rank, 2, aborted.set) for rank in range(2)]


def broken():
    raise RuntimeError(BROKEN)


def test_a_wait_for_a_rank_that_left_is_aborted():
    aborted, (mine, other) = pair_of_watches()
    other.issue("gathers")
    other.say_farewell()

    def wait():
        assert aborted.wait(5), "nobody aborted the wait"
        broken()

    mine.wait(lambda: None, "gathers", 1, "what was sent before the end")
    started = time.monotonic()
    with pytest.raises(CommunicationError, match="rank 1 has ended while this rank waits for the gather of a.weight"):
        mine.wait(wait, "gathers", 2, "the gather of a.weight")
    assert time.monotonic() - started < 2


def test_a_broken_connection_is_explained_by_the_farewell_or_in_plain_words_and_only_once_waited_for():
    _, (mine, other) = pair_of_watches()
    started = time.monotonic()
    mine._patience = 0.2  # it is seconds otherwise
    with pytest.raises(CommunicationError) as raised:
        mine.wait(broken, "gathers", 1, "the gather of a")
    said = "waiting for the gather of a failed; a peer has probably died or timed out: Connection closed by peer"
    assert str(raised.value) == f"{said} [10.0.0.1]:99."
    with pytest.raises(CommunicationError, match="probably died"):
        mine.wait(broken, "gathers", 1, "the gather of a")
    assert time.monotonic() - started < 2 and mine._patience == 0
    other.say_farewell()
    with pytest.raises(CommunicationError, match="rank 1 has ended"):
        mine.wait(broken, "gathers", 1, "the gather of a")
