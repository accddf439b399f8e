"""What is counted while somebody reads it."""

import torch

from deepspeed.comm.base.counters import Tally, WaitClock, traffic
from deepspeed.comm.job.job import Job
from tests.harness import run_ranks


def test_the_clock_runs_until_its_last_reader_leaves():
    clock = WaitClock()
    clock.start()
    clock.start()
    clock.stop()
    assert clock.is_running
    clock.stop()
    assert not clock.is_running


def _broadcast() -> dict[str, Tally]:
    transport = Job.adopt().axis_of().transport("outside engines")
    traffic.reset()
    transport.broadcast(torch.ones(5), 1, label="a test")
    return {"requested": traffic.requested["broadcast"], "ran": traffic.ran["broadcast"]}


def test_broadcasts_are_counted_by_the_rank_that_sends() -> None:
    first, second = run_ranks(_broadcast, 2)
    assert first == {"requested": Tally(1, 20), "ran": Tally(1, 0)}
    assert second == {"requested": Tally(1, 20), "ran": Tally(1, 20)}
