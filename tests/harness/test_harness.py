"""The harness itself: results, failures, hangs, crashes, and that nothing leaks from one run into the next."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.harness import (
    RankDied,
    RanksFailed,
    RanksTimedOut,
    assert_states_equal,
    fork_server,
    on_first_rank,
    on_ranks,
    on_threads,
    pickling,
    pool,
    run_ranks,
)


def _sum_of_ranks(size, fill=1.0):
    x = torch.full((size,), fill * (dist.get_rank() + 1))
    dist.all_reduce(x)
    return {"sum": x, "row": torch.arange(6).reshape(2, 3)[1], "rank": dist.get_rank()}


def test_results_come_back_in_rank_order():
    results = run_ranks(_sum_of_ranks, 3, 4, fill=2.0)
    assert [r["rank"] for r in results] == [0, 1, 2]
    for result in results:
        assert_states_equal(result["sum"], torch.full((4,), 12.0))
        assert_states_equal(result["row"], torch.tensor([3, 4, 5]))


def _describe_process():
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {
        "pid": os.getpid(),
        "env": {key: os.environ[key] for key in keys},
        "threads": torch.get_num_threads(),
        "draws": (random.random(), float(np.random.rand()), torch.rand(1).item()),
    }


def test_environment_threads_and_seeds():
    first, second = run_ranks(_describe_process, 2)
    assert first["env"]["RANK"] == first["env"]["LOCAL_RANK"] == "0"
    assert second["env"]["RANK"] == second["env"]["LOCAL_RANK"] == "1"
    assert first["env"]["WORLD_SIZE"] == "2"
    assert first["env"]["MASTER_PORT"] == second["env"]["MASTER_PORT"]
    assert first["threads"] == 1
    assert first["draws"] == second["draws"]


@on_ranks(2)
def _passes_on_rank_0(rank, ranks):
    assert (rank, ranks) == (0, 2)


@on_threads(3)
def _passes_on_thread_0(transport, ranks):
    assert (transport.rank, ranks) == (0, 3)


def test_a_test_that_ranks_run_fails_where_one_of_them_does():
    with pytest.raises(RanksFailed) as caught:
        _passes_on_rank_0()
    assert caught.value.first.rank == 1 and "AssertionError" in str(caught.value)
    with pytest.raises(AssertionError):
        _passes_on_thread_0()


def test_workers_are_reused_also_after_an_exception():
    before = [r["pid"] for r in run_ranks(_describe_process, 2)]
    with pytest.raises(RanksFailed):
        run_ranks(_raise_on_rank, 2, 1)
    assert [r["pid"] for r in run_ranks(_describe_process, 2)] == before
    assert run_ranks(_describe_process, 2, fresh=True)[0]["pid"] not in before


@on_first_rank
def _drawn_on(start):
    return {"rank": dist.get_rank(), "values": start + torch.rand(3)}


def _draw_around_a_reference():
    before = torch.rand(1).item()
    return before, _drawn_on(10), torch.rand(1).item()


def test_a_reference_is_computed_on_the_first_rank_and_draws_none_of_the_random_numbers():
    results = run_ranks(_draw_around_a_reference, 3)
    assert_states_equal(results[1:], [results[0]] * 2)
    before, found, after = results[0]
    assert found["rank"] == 0 and found["values"].min() >= 10
    torch.manual_seed(1234)
    assert [before, after] == torch.rand(2).tolist()


def _change_everything():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    os.environ["LEAK"] = "1"
    os.environ["HOME"] = "elsewhere"
    os.chdir("/")


def _observe():
    return {
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "leak": os.environ.get("LEAK"),
        "home": os.environ.get("HOME"),
        "directory": os.getcwd(),
    }


def test_global_state_is_restored():
    before = run_ranks(_observe, 2)
    run_ranks(_change_everything, 2)
    assert run_ranks(_observe, 2) == before


class _Knot:
    """Refers to itself, so only a collection frees it."""

    last: weakref.ref[_Knot] | None = None

    def __init__(self) -> None:
        self.itself = self


def _leave_a_knot():
    had_gone = _Knot.last is None or _Knot.last() is None
    _Knot.last = weakref.ref(_Knot())
    return had_gone, len(gc.get_objects()) < gc.get_freeze_count() / 10


def test_what_a_run_left_is_collected_without_looking_through_all_modules():
    with_modules_new = run_ranks(_leave_a_knot, 2)
    assert [run_ranks(_leave_a_knot, 2) for _ in range(2)] == [with_modules_new] * 2 == [[(True, True)] * 2] * 2


def test_env_is_for_one_run_and_backend_none_leaves_the_group_to_the_function():
    assert run_ranks(_observe, 2, env={"LEAK": "wanted"})[1]["leak"] == "wanted"
    assert run_ranks(_observe, 2)[1]["leak"] is None
    assert run_ranks(_group_exists, 2, backend=None) == [False, False]
    assert run_ranks(_group_exists, 2) == [True, True]


def _group_exists():
    return dist.is_initialized()


def _fail_to_start_a_group_on_rank(rank):
    if dist.get_rank() == rank:
        dist.destroy_process_group()
        backend = "gloo" if torch.cuda.is_available() else "nccl"
        os.environ["GLOO_SOCKET_IFNAME"] = "no-such-interface"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def test_a_group_that_failed_to_start_does_not_reach_the_next_run():
    with pytest.raises(RanksFailed):
        run_ranks(_fail_to_start_a_group_on_rank, 2, 1)
    assert run_ranks(_group_exists, 2, timeout=20) == [True, True]


def _raise_on_rank(rank):
    print(f"a word from rank {dist.get_rank()}")
    if dist.get_rank() == rank:
        raise ValueError("the third cause")
    dist.barrier()


def test_an_exception_shows_every_rank_the_first_failure_on_top():
    with pytest.raises(RanksFailed, match="the third cause") as caught:
        run_ranks(_raise_on_rank, 3, 1)
    error = caught.value
    assert error.first.rank == 1
    assert isinstance(error.first.exception, ValueError)
    text = str(error)
    assert text.index("rank 1: raised ValueError") < text.index("rank 0: raised") < text.index("rank 2: raised")
    assert "in _raise_on_rank" in text
    assert "a word from rank 2" in text


def _assert_something():
    ranks = list(range(dist.get_world_size()))
    assert ranks == [0, 7]


def test_a_failed_assertion_shows_its_values():
    with pytest.raises(RanksFailed, match=r"assert \[0, 1\] == \[0, 7\]"):
        run_ranks(_assert_something, 2)


class _NeedsTwo(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def _raise_unpicklable():
    raise _NeedsTwo(1, 2)


def test_an_exception_that_cannot_be_sent_is_still_described():
    with pytest.raises(RanksFailed, match="_NeedsTwo: 1 and 2") as caught:
        run_ranks(_raise_unpicklable, 1)
    assert caught.value.first.exception is None


def _hang_on_rank(rank):
    if dist.get_rank() == rank:
        _sleep_here()
    dist.barrier()


def _sleep_here():
    time.sleep(600)


def _put_signals_back():
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_hang_shows_the_stack_of_every_rank_and_the_pool_recovers():
    run_ranks(_put_signals_back, 2)  # as Lightning's Trainer does when it ends
    started = time.monotonic()
    with pytest.raises(RanksTimedOut, match="did not finish in 2 s") as caught:
        run_ranks(_hang_on_rank, 2, 1, timeout=2)
    assert time.monotonic() - started < 60
    reports = caught.value.reports
    assert "_sleep_here" in reports[1].detail
    assert "barrier" in reports[0].detail and "_hang_on_rank" in reports[0].detail
    assert run_ranks(_group_exists, 2) == [True, True]


def _one_raises_one_hangs():
    if dist.get_rank() == 0:
        raise RuntimeError("left early")
    _sleep_here()


def test_peers_of_a_failed_rank_get_a_short_grace(monkeypatch):
    monkeypatch.setattr(pool, "PEER_LIMIT", 2.0)
    with pytest.raises(RanksFailed, match="left early") as caught:
        run_ranks(_one_raises_one_hangs, 2, timeout=100)
    assert caught.value.first.rank == 0
    assert "still running" in caught.value.reports[1].outcome
    assert "_sleep_here" in caught.value.reports[1].detail


def _die(rank, how):
    if dist.get_rank() == rank:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    dist.barrier()


@pytest.mark.parametrize(("how", "outcome"), [("SIGSEGV", "died of SIGSEGV"), ("exit", "exited with code 7")])
def test_a_dead_worker_is_named_and_the_pool_recovers(how, outcome):
    with pytest.raises(RankDied, match=f"rank 1: {outcome}") as caught:
        run_ranks(_die, 2, 1, how)
    assert caught.value.first.rank == 1
    if how == "SIGSEGV":
        assert "_die" in caught.value.first.detail
    assert run_ranks(_group_exists, 2) == [True, True]


def _leave_a_receive_in_flight():
    _leave_a_receive_in_flight.work = dist.irecv(torch.zeros(1), src=1 - dist.get_rank())
    return "returned"


def test_work_left_in_flight_does_not_reach_the_next_run():
    try:
        assert run_ranks(_leave_a_receive_in_flight, 2) == ["returned"] * 2
    except RanksTimedOut as error:
        assert "hung in cleaning up" in str(error)
    assert_states_equal(run_ranks(_sum_of_ranks, 2, 1)[0]["sum"], torch.tensor([3.0]))


def _skip():
    pytest.skip("no such device")


def _return_at_once(left: Path) -> None:
    if dist.get_rank() == 1:
        destroy = dist.destroy_process_group

        def note_and_destroy() -> None:
            dist.destroy_process_group = destroy
            left.touch()
            destroy()

        dist.destroy_process_group = note_and_destroy
    else:
        time.sleep(0.5)
        assert not left.exists()


def test_a_rank_that_returned_keeps_its_process_group_for_the_others(tmp_path):
    run_ranks(_return_at_once, 2, tmp_path / "left")
    assert (tmp_path / "left").exists()


def test_a_skip_is_sent():
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        run_ranks(_skip, 2)


def test_a_function_that_workers_cannot_import_is_refused():
    with pytest.raises(TypeError, match="module-level function"):
        run_ranks(lambda: None, 2)


def test_a_time_limit_within_a_question_to_a_fork_server_reaches_no_later_run(monkeypatch):
    def interrupt(channel):
        raise KeyboardInterrupt

    monkeypatch.setattr(fork_server, "START", "import time; time.sleep(600)")
    monkeypatch.setattr(pool, "_servers", [pool.ForkServer(), pool.ForkServer()])
    stopped, other = pool._servers
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    process = fork_server.ForkedProcess(stopped, worker.pid)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(fork_server, "_receive", interrupt)
            process.poll()
        assert stopped.is_closed
        assert process.poll() == worker.wait(60) == -signal.SIGKILL  # without another question
        first, second = pool._fork_servers()
        assert first is other and second is not stopped and not second.is_closed
    finally:
        worker.kill()
        for server in [stopped, *pool._servers]:
            server.close()


def test_processes_that_share_the_tests_share_two_servers():
    run_ranks(_describe_process, 2)
    shared = {server.shared for server in pool._fork_servers()}
    assert shared == (set(fork_server.shared_addresses()) or {None})


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them():
    script = "import tests.harness.test_harness as t; t.run_ranks(t._print_pid, 2); import os; os.kill(os.getpid(), 9)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    pids = [int(line.split()[-1]) for line in ended.stdout.splitlines()]
    assert len(pids) == 2, ended
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_alive(pid) for pid in pids)


def _print_pid():
    print(os.getpid(), flush=True)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_tensors_are_sent_without_their_neighbors():
    big = torch.zeros(1_000_000)
    assert len(pickling.dumps(big[:3])) < 1000
    linear = torch.nn.Linear(3, 2)
    again = pickling.loads(pickling.dumps(linear))
    assert isinstance(again.weight, torch.nn.Parameter)
    assert_states_equal(again.state_dict(), linear.state_dict())
    for value in (torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 3), torch.ones(2, 2).t(), torch.tensor(True)):
        assert_states_equal(pickling.loads(pickling.dumps(value)), value)


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ({"a": 1}, {"b": 1}, r"\['b'\] is missing"),
        ([1, 2], [1], "has 2 elements"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "float32.*expected torch.float64"),
        ({"x": [torch.tensor([1.0, 2.0])]}, {"x": [torch.tensor([1.0, 2.5])]}, r"\['x'\]\[0\]: 1 of 2 elements"),
        (1.0, 1.1, "1.0, expected 1.1"),
        (torch.tensor([1]), [1], "expected"),
    ],
)
def test_differences_are_named(left, right, message):
    with pytest.raises(AssertionError, match=message):
        assert_states_equal(left, right)


def test_equal_states_and_tolerances():
    state = {"t": torch.tensor([float("nan"), 1.0]), "l": [np.arange(3), (1, "x", None)], "f": 0.5}
    assert_states_equal(state, state)
    assert_states_equal(torch.tensor([1.0]), torch.tensor([1.001]), rtol=1e-2)
    with pytest.raises(AssertionError):
        assert_states_equal(torch.tensor([1.0]), torch.tensor([1.001]))
