"""Processes of two runs come to one store: nobody is let in who belongs to the other, and everybody is told."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as torch_dist

from deepspeed.comm import reception
from deepspeed.comm.reception import Guest, job_of, receive_ranks
from deepspeed.comm.startup import Facts
from deepspeed.errors import CommunicationError

FACTS = Facts("a", 1, 0, "cpu", 0, "1.0", "gloo")
WHERE = "127.0.0.1:29500"


def guest(rank, run="", pid=None, parent=7, world_size=2, command="train.py", **facts):
    pid = pid if pid is not None else 100 + rank
    return Guest(rank, world_size, run, command, job_of(command.split()), parent, replace(FACTS, pid=pid, **facts))


class Meeting:
    """A store and those who come to it, each in a thread."""

    def __init__(self, seconds=10.0):
        self.store = torch_dist.HashStore()
        self.timeout = timedelta(seconds=seconds)
        self._pool = ThreadPoolExecutor(8)

    def comes(self, who):
        return self._pool.submit(receive_ranks, self.store, who, WHERE, self.timeout)

    def has_arrived(self, count):
        while self.store.add("deepspeed/reception/arrivals", 0) < count:
            threading.Event().wait(0.002)


def refused(outcome):
    error = outcome.exception(timeout=10)
    assert isinstance(error, CommunicationError), error
    return str(error)


@pytest.fixture
def warnings(monkeypatch):
    said = []
    monkeypatch.setattr(reception.logger, "warning", said.append)
    return said


def test_ranks_of_one_run_get_keys_of_their_own():
    here = Meeting()
    outcomes = [here.comes(guest(rank, "run x", world_size=3)) for rank in range(3)]
    prefixes = {outcome.result(10)[0] for outcome in outcomes}
    assert len(prefixes) == 1
    assert [fact.pid for fact in outcomes[0].result()[1]] == [100, 101, 102] and outcomes[1].result()[1] == []
    again = [here.comes(guest(rank, "run x", world_size=3)) for rank in range(3)]  # a store may live on
    assert len({outcome.result(10)[0] for outcome in again} | prefixes) == 2


def test_a_stranger_is_refused_by_name_on_both_sides(warnings):
    here = Meeting()
    stranger = here.comes(guest(1, "Open MPI job 9", 55, command="other.py --x"))
    here.has_arrived(1)
    host = here.comes(guest(0, "run x"))
    told = refused(stranger)
    assert "where another run meets: that of process 100 on host a, rank 0 of 2 of `train.py` (run x)" in told
    assert "This is process 55 on host a, rank 1 of 2 of `other.py --x` (Open MPI job 9)" in told
    assert "set MASTER_PORT" in told
    (line,) = warnings
    assert "refused process 55 on host a, rank 1 of 2 of `other.py --x` (Open MPI job 9)" in line
    own = here.comes(guest(1, "run x"))
    assert own.result(10)[0] == host.result(10)[0]
    assert [fact.pid for fact in host.result()[1]] == [100, 101]


@pytest.mark.parametrize("change", [{"world_size": 3}, {"run": ""}, {"rank": 0}])
def test_other_strangers(change, warnings):
    here = Meeting()
    host = here.comes(guest(0, "run x"))
    while not here.store.check(["deepspeed/reception/host"]):
        pass
    told = refused(here.comes(guest(**{"rank": 1, "run": "run x", "pid": 55, **change})))
    assert "where another run meets" in told and ("same DS_RUN_ID" in told) == ("run" in change)
    here.comes(guest(1, "run x")).result(10)
    assert host.result(10)[1] and "process 55" in warnings[0]


def test_who_comes_late_learns_whose_meeting_it_was(monkeypatch):
    monkeypatch.setattr(reception, "_LATE_SECONDS", 0.1)
    here = Meeting()
    for outcome in [here.comes(guest(rank, "run x")) for rank in range(2)]:
        outcome.result(10)
    told = refused(here.comes(guest(1, "run y", 55)))
    assert "another run has met already: that of process 100" in told and "its rank 1 is process 101" in told


def test_another_job_of_this_machine_is_a_stranger_where_nobody_names_the_run(warnings):
    here = Meeting()
    stranger = here.comes(guest(1, pid=55, parent=8, command="other.py"))
    here.has_arrived(1)
    host = here.comes(guest(0))
    assert "same DS_RUN_ID" in refused(stranger) and "process 55" in warnings[0]
    own = here.comes(guest(1, command="train.py --role worker"))  # started together with rank 0
    assert own.result(10) and [fact.pid for fact in host.result(10)[1]] == [100, 101]


def test_a_parent_in_common_decides_between_two_that_run_the_same(warnings):
    for pids in ((55, 101), (101, 55)):
        here = Meeting()
        claims = {}
        for count, pid in enumerate(pids, 1):
            claims[pid] = here.comes(guest(1, pid=pid, parent=7 if pid == 101 else 8))
            here.has_arrived(count)
        assert here.comes(guest(0)).result(10)[1][1].pid == 101 and claims[101].result(10)
        assert "another run meets" in refused(claims[55]) and "process 55" in warnings.pop()


def test_all_are_refused_where_nothing_tells_who_is_who():
    here = Meeting()
    claims = [here.comes(guest(1, host="b", pid=pid, parent=pid + 50)) for pid in (5, 6)]
    here.has_arrived(2)
    host = here.comes(guest(0))
    words = {refused(outcome) for outcome in (host, *claims)}
    assert len(words) == 1
    (told,) = words
    assert "process 5 on host b" in told and "process 6 on host b" in told and "DS_RUN_ID" in told


def test_ranks_in_two_terminals_are_one_run():
    here = Meeting()
    outcomes = [
        here.comes(guest(rank, parent=50 + rank, command=f"train.py --local_rank={rank} --node_rank {rank}"))
        for rank in range(2)
    ]
    assert len({outcome.result(10)[0] for outcome in outcomes}) == 1


def test_who_does_not_come_is_named():
    here = Meeting(seconds=0.5)
    outcomes = [here.comes(guest(rank, world_size=4)) for rank in (0, 2)]
    told = {refused(outcome) for outcome in outcomes}
    assert told == {
        f"ranks 1, 3 of 4 did not come to {WHERE} within 0:00:00.500000. Check that all 4 processes were started and "
        "can reach that address"
    }
    alone = Meeting(seconds=0.1)
    assert "no word from rank 0" in refused(alone.comes(guest(1)))
