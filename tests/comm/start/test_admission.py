"""Processes of two runs reach one store: those of the other run are refused, and every process gets an error."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as torch_dist

from deepspeed.comm.start import admission
from deepspeed.comm.start.admission import JoiningProcess, job_of, receive_ranks
from deepspeed.comm.start.startup import RankInfo
from deepspeed.errors import CommunicationError

FACTS = RankInfo("a", 1, 0, "cpu", 0, "1.0", "gloo")
WHERE = "127.0.0.1:29500"


def process(rank, run="", pid=None, parent=7, world_size=2, command="train.py", has_agent=False, **facts):
    facts = replace(FACTS, pid=pid if pid is not None else 100 + rank, **facts)
    return JoiningProcess(rank, world_size, run, command, job_of(command.split()), parent, facts, has_agent)


class Meeting:
    """A store and those who come to it, each in a thread."""

    def __init__(self, seconds=60.0):
        self.store = torch_dist.HashStore()
        self.timeout = timedelta(seconds=seconds)
        self._pool = ThreadPoolExecutor(8)

    def comes(self, who):
        return self._pool.submit(receive_ranks, self.store, who, WHERE, self.timeout)

    def opens(self, who):
        """Rank 0 comes; returns its outcome once others can arrive."""
        before = self.at()
        outcome = self.comes(who)
        while self.at() == before:
            threading.Event().wait(0.002)
        return outcome

    def at(self):
        if self.store.check([admission._HOST]):
            return admission.RendezvousPoint.from_json(self.store.get(admission._HOST))
        return None

    def has_arrived(self, count):
        while self.store.add(self.at().key("arrivals"), 0) < count:
            threading.Event().wait(0.002)


def refused(outcome):
    error = outcome.exception(timeout=60)
    assert isinstance(error, CommunicationError), error
    return str(error)


@pytest.fixture
def warnings(monkeypatch):
    texts = []
    monkeypatch.setattr(admission.logger, "warning", texts.append)
    return texts


def test_ranks_of_one_run_get_keys_of_their_own():
    here = Meeting()
    outcomes = [here.comes(process(rank, "run x", world_size=3)) for rank in range(3)]
    prefixes = {outcome.result(60)[0] for outcome in outcomes}
    assert len(prefixes) == 1
    assert [fact.pid for fact in outcomes[0].result()[1]] == [100, 101, 102] and outcomes[1].result()[1] == []
    again = [here.comes(process(rank, "run x", world_size=3)) for rank in range(3)]  # a store may live on
    assert len({outcome.result(60)[0] for outcome in again} | prefixes) == 2


def test_a_stranger_is_refused_by_name_on_both_sides(warnings):
    here = Meeting()
    stranger = here.comes(process(1, "Open MPI job 9", 55, command="other.py --x"))
    host = here.comes(process(0, "run x"))
    reason = refused(stranger)
    assert "the rendezvous of another run, that of process 100 on host a, rank 0 of 2 of `train.py` (run x)" in reason
    assert "It refused this process, process 55 on host a, rank 1 of 2 of `other.py --x` (Open MPI job 9)" in reason
    assert "set MASTER_PORT" in reason
    (line,) = warnings
    assert "refused process 55 on host a, rank 1 of 2 of `other.py --x` (Open MPI job 9)" in line
    own = here.comes(process(1, "run x"))
    assert own.result(60)[0] == host.result(60)[0]
    assert [fact.pid for fact in host.result()[1]] == [100, 101]


@pytest.mark.parametrize("change", [{"world_size": 3}, {"run": ""}, {"rank": 0}])
def test_other_strangers(change, warnings):
    here = Meeting()
    host = here.opens(process(0, "run x"))
    reason = refused(here.comes(process(**{"rank": 1, "run": "run x", "pid": 55, **change})))
    assert "the rendezvous of another run" in reason and ("same DS_RUN_ID" in reason) == ("run" in change)
    here.comes(process(1, "run x")).result(60)
    assert host.result(60)[1] and "process 55" in warnings[0]


def test_a_late_process_learns_whose_rendezvous_it_was(monkeypatch):
    monkeypatch.setattr(admission, "_LATE_SECONDS", 0.1)
    here = Meeting()
    for outcome in [here.comes(process(rank, "run x")) for rank in range(2)]:
        outcome.result(60)
    reason = refused(here.comes(process(1, "run y", 55)))
    for part in ("another run has used this address already, that of process 100", "its rank 1 is process 101"):
        assert part in reason


def test_another_job_of_this_machine_is_a_stranger_where_nobody_names_the_run(warnings):
    here = Meeting()
    stranger = here.comes(process(1, pid=55, parent=8, command="other.py"))
    host = here.comes(process(0))
    assert "same DS_RUN_ID" in refused(stranger) and "process 55" in warnings[0]
    own = here.comes(process(1, command="train.py --role worker"))  # started together with rank 0
    assert own.result(60) and [fact.pid for fact in host.result(60)[1]] == [100, 101]


def test_a_command_line_of_any_bytes_makes_a_job():
    words = ["train.py", os.fsdecode(b"/data/caf\xe9"), "--local_rank=1"]
    assert job_of(words) == job_of([*words[:2], "--local_rank=3"]) != job_of(["train.py", "/data/cafe", words[2]])


def test_a_parent_in_common_decides_between_two_that_run_the_same(warnings):
    for pids in ((55, 101), (101, 55)):
        here = Meeting()
        host = here.opens(process(0, world_size=3))
        claims = {}
        for count, pid in enumerate(pids, 1):
            claims[pid] = here.comes(process(1, pid=pid, parent=7 if pid == 101 else 8, world_size=3))
            here.has_arrived(count)
        here.comes(process(2, world_size=3)).result(60)
        assert host.result(60)[1][1].pid == 101 and claims[101].result(60)
        assert "rendezvous of another run" in refused(claims[55]) and "process 55" in warnings.pop()


def test_all_are_refused_where_nothing_identifies_them():
    here = Meeting()
    host = here.opens(process(0, world_size=3))
    claims = [here.comes(process(1, host="b", pid=pid, parent=pid + 50, world_size=3)) for pid in (5, 6)]
    words = {refused(outcome) for outcome in (host, *claims)}
    assert len(words) == 1
    (reason,) = words
    assert "process 5 on host b" in reason and "process 6 on host b" in reason and "DS_RUN_ID" in reason


def test_ranks_in_two_terminals_are_one_run():
    here = Meeting()
    outcomes = [
        here.comes(process(rank, parent=50 + rank, command=f"train.py --local_rank={rank} --node_rank {rank}"))
        for rank in range(2)
    ]
    assert len({outcome.result(60)[0] for outcome in outcomes}) == 1


def test_who_does_not_come_is_named():
    here = Meeting(seconds=0.5)
    outcomes = [here.comes(process(rank, world_size=4)) for rank in (0, 2)]
    reason = {refused(outcome) for outcome in outcomes}
    assert reason == {
        f"ranks 1, 3 of 4 did not connect to {WHERE} within 0:00:00.500000. Check that all 4 processes were started "
        "and can reach that address"
    }
    alone = Meeting(seconds=0.1)
    assert "nothing came from rank 0" in refused(alone.comes(process(1)))


# --- restarts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["torchrun run x", ""])
def test_ranks_that_an_agent_starts_again_meet_again(run, monkeypatch):
    """Several attempts at one store; the others come before rank 0, whose last meeting is over or was never closed."""
    monkeypatch.setattr(admission, "_LATE_SECONDS", 0.05)
    here = Meeting()
    prefixes = set()
    for attempt in range(3):
        pids = [1000 * attempt + rank for rank in range(2)]
        other = here.comes(process(1, run, pids[1], has_agent=True, host="b", parent=9))
        threading.Event().wait(0.2)  # longer than a stranger may be late
        host = here.comes(process(0, run, pids[0], has_agent=True))
        assert [fact.pid for fact in host.result(60)[1]] == pids
        assert other.result(60)[0] == host.result(60)[0]
        prefixes.add(host.result()[0])
        broken = admission.RendezvousPoint(f"broken{attempt}", process(0, run, 7000 + attempt, has_agent=True))
        here.store.set("deepspeed/admission/host", broken.to_json())  # rank 0 died while it waited
    assert len(prefixes) == 3


def test_a_rank_that_is_started_again_while_rank_0_waits_takes_its_place():
    here = Meeting()
    host = here.opens(process(0, world_size=3, has_agent=True))
    here.comes(process(1, pid=55, world_size=3, host="b", parent=9, has_agent=True))  # and is killed
    here.has_arrived(1)
    own = [here.comes(process(rank, world_size=3, host="b", parent=9, has_agent=True)) for rank in (1, 2)]
    assert [fact.pid for fact in host.result(60)[1]] == [100, 101, 102]
    assert {outcome.result(60)[0] for outcome in own} == {host.result()[0]}


@pytest.mark.parametrize("change", [{"has_agent": False}, {"host": "b"}, {"run": "torchrun run y"}])
def test_another_rank_0_is_no_restart(change):
    here = Meeting()
    here.opens(process(0, "torchrun run x", has_agent=True))
    second = here.comes(process(**{"rank": 0, "run": "torchrun run x", "pid": 55, "has_agent": True, **change}))
    assert "the rendezvous of another run" in refused(second)
    assert here.at().host.facts.pid == 100


def test_a_store_that_ends_with_the_attempt_before_is_left_for_the_next():
    here = Meeting()
    for outcome in [here.comes(process(rank)) for rank in range(2)]:
        outcome.result(60)
    store = here.store

    class Ending:
        ends = False

        def __getattr__(self, name):
            if self.ends:
                raise torch_dist.DistNetworkError("Connection reset by peer")
            return getattr(store, name)

    here.store = Ending()
    again = here.comes(process(1, pid=55))
    here.has_arrived(2)
    Ending.ends = True
    assert isinstance(again.exception(timeout=60), admission.StoreLostError)


@pytest.mark.parametrize("post", ["[]", "7", "null", "{}", "not JSON", '{"rank": "1"}', '{"rank": 1, "facts": []}'])
def test_a_post_that_is_no_rank_is_refused_and_the_others_meet(post, warnings):
    here = Meeting()
    host = here.opens(process(0))
    number = here.store.add(here.at().key("arrivals"), 1)
    here.store.set(here.at().key(f"arrival/{number}"), post)
    assert here.comes(process(1)).result(60)[0] == host.result(60)[0]
    assert "ignored a process" in warnings[0]
    assert b"error" in here.store.get(here.at().key(f"answer/{number}"))


@pytest.mark.parametrize("rank", [0, 1])
def test_another_program_at_the_rendezvous_address_is_named(rank):
    here = Meeting()
    here.store.set(admission._HOST, "junk")
    assert "that no rank of this version has written" in refused(here.comes(process(rank)))


def test_text_of_a_stranger_cannot_control_the_terminal(warnings):
    here = Meeting()
    host = here.opens(process(0, "run x"))
    reason = refused(here.comes(process(1, "run \x1b]0;title\x07", 55, command="evil \x1b[2J")))
    here.comes(process(1, "run x")).result(60)
    host.result(60)
    assert "\x1b" not in reason + warnings[0] and "\x07" not in reason + warnings[0] and "evil ?[2J" in warnings[0]
