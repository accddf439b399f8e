"""What can no more begin is told as what can no more end: by the wait, in the words of the watch."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import start_p2p
from deepspeed.comm.watch.watched_group import _abort
from deepspeed.errors import CommunicationError
from tests.harness import run_ranks


def _closed() -> str:
    transport = Job.current().connector.over(dist.group.WORLD, None)
    flat = torch.ones(2 << 16)
    transport.all_gather(flat, key=transport.next_move(), label="the first").wait()
    watched = Job.current().watched.of()
    assert watched is not None
    if dist.get_rank() == 1:
        _abort(watched)
    time.sleep(1.0)
    works = [transport.all_gather(flat, key=transport.next_move(), label=f"number {i}") for i in range(3)]
    with pytest.raises(CommunicationError) as raised:
        works[0].wait()
    time.sleep(1.0)
    return str(raised.value)


def test_a_gather_over_connections_that_are_closed():
    for text in run_ranks(_closed, 2):
        assert text.startswith("waiting for number 0 failed; a peer has probably died or timed out"), text


def _fails(*_given: object) -> None:
    raise RuntimeError("Connection closed by peer")


def test_a_transfer_that_cannot_begin():
    transfer = start_p2p(_fails, torch.ones(1), 1, 0)
    assert not transfer.is_completed()
    with pytest.raises(RuntimeError, match="closed by peer"):
        transfer.wait(1.0)
