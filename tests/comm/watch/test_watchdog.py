"""Ranks that wait in vain get an error at once: their peer has ended, or executes another operation."""

import atexit
import json
import multiprocessing
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as torch_dist

from deepspeed.comm.job.job import Job
from deepspeed.comm.watch import posts
from deepspeed.comm.watch import watchdog as watch_module
from deepspeed.comm.watch.processes import has_ended, this_process
from deepspeed.comm.watch.wait_records import WaitRecord
from deepspeed.comm.watch.watchdog import Watch
from deepspeed.errors import CommunicationError, DivergenceError
from tests.harness import run_ranks

BROKEN = "[/src/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:99. This is typically caused by bad luck."


def pair_of_watches():
    store, aborted = torch_dist.HashStore(), threading.Event()
    watches = [Watch(store, "here", rank, 2) for rank in range(2)]
    for watch in watches:
        watch.aborts[0] = aborted.set
    return aborted, watches


BOTH = (0, 1)


def broken():
    raise RuntimeError(BROKEN)


def broken_by(aborted):
    """Returns a wait that ends with torch's error once ``aborted`` is set."""

    def wait():
        assert aborted.wait(60), "nobody aborted the wait"
        broken()

    return wait


def test_a_wait_for_a_rank_that_left_is_aborted():
    aborted, (mine, other) = pair_of_watches()
    other.issue("gathers")
    other.post_exit_notice()

    mine.wait(lambda: None, "gathers", 1, "what was sent before the end", BOTH)
    with pytest.raises(CommunicationError, match="rank 1 has ended while this rank waits for the gather of a.weight"):
        mine.wait(broken_by(aborted), "gathers", 2, "the gather of a.weight", BOTH)


def test_a_long_wait_is_logged_with_the_ranks_that_are_missing(monkeypatch):
    """The other rank may be in a call that is not supervised, so that no error ever ends the wait."""
    lines = []
    monkeypatch.setattr(watch_module.logger, "warning", lines.append)
    _, (mine, other) = pair_of_watches()
    for _ in range(2):
        mine.issue("gathers")
    other.issue("gathers")

    def look(seconds):
        mine._awaited = WaitRecord("gathers", 2, BOTH, "the gather of a.weight", start)
        monkeypatch.setattr(watch_module.time, "monotonic", lambda: start + seconds)
        assert mine.look_after_long_wait()

    start = time.monotonic()
    look(59.0)
    assert not lines
    look(61.0)
    assert len(lines) == 1
    assert lines[0].startswith("rank 0 has waited 61 s for the gather of a.weight, which rank 1 has not reached. ")
    look(121.0)
    assert len(lines) == 1
    look(123.0)
    assert "rank 0 has waited 123 s" in lines[1] and len(lines) == 2
    other.issue("gathers")
    other._check(WaitRecord("steps", other.issue("steps"), (1,), "a step", start), blocks_host=True)
    look(1000.0)
    assert len(lines) == 2  # it has come since: the transfer itself takes long


def test_nothing_is_taken_from_an_aborted_communicator():
    """A transfer on a stream ends without an error when its communicator is aborted, and its buffer is as it was."""
    aborted, (mine, other) = pair_of_watches()
    other.issue("step")
    other.post_exit_notice()

    def ends_quietly():
        assert aborted.wait(60), "nobody aborted the wait"

    with pytest.raises(CommunicationError, match="rank 1 has ended while this rank waits for the agreement"):
        mine.wait(ends_quietly, "step", 2, "the agreement of the update", BOTH)
    with pytest.raises(CommunicationError, match="rank 1 has ended"):
        mine.wait(lambda: None, "gather", 1, "a later gather", BOTH)


class Reached:
    """An event of a device."""

    def __init__(self):
        self.is_over = False

    def query(self):
        return self.is_over


def look_at_both(mine, other, times=4):
    for _ in range(times):
        for watch in (mine, other):
            watch.look_after_long_wait()
        time.sleep(0.21)


def test_streams_that_wait_in_a_cycle():
    """Neither host waits: what would is a read of the loss, in the program."""
    aborted, (mine, other) = pair_of_watches()
    for watch, channel in ((mine, "gathers"), (other, "order")):
        earlier = Reached()
        watch.follow(earlier, channel, watch.issue(channel), f"the first of the {channel}", BOTH)
        watch.issue("order" if channel == "gathers" else "gathers")
        earlier.is_over = True
        watch.follow(Reached(), channel, watch.issue(channel), f"the second of the {channel}", BOTH)
    look_at_both(mine, other)
    assert aborted.is_set()
    for watch in (mine, other):
        with pytest.raises(DivergenceError, match="rank 0 waits for the second of the gathers; rank 1 waits for the s"):
            watch.wait(lambda: None, "step", 1, "the update", BOTH)


def test_a_stream_that_waits_does_not_hold_up_its_host():
    """Rank 0 waits on the host for something that rank 1, whose stream waits for rank 0, may still do."""
    aborted, (mine, other) = pair_of_watches()
    reached = Reached()
    other.follow(reached, "gathers", other.issue("gathers"), "a gather", BOTH)
    mine._awaited = WaitRecord("save", mine.issue("save"), BOTH, "a checkpoint", 0.0)
    look_at_both(mine, other)
    assert not aborted.is_set()
    reached.is_over = True
    assert other._stuck_on_device() is None


def test_what_the_host_waits_for_comes_behind_what_its_stream_waits_for():
    aborted, (mine, other) = pair_of_watches()
    mine.follow(Reached(), "gathers", mine.issue("gathers"), "a gather", BOTH)
    mine._awaited = WaitRecord("step", mine.issue("step"), BOTH, "the update", 0.0, on_stream=True)
    other.issue("step")
    other._awaited = WaitRecord("save", other.issue("save"), BOTH, "a checkpoint", 0.0)
    look_at_both(mine, other)
    assert aborted.is_set() and "rank 0 waits for a gather; rank 1 waits for a checkpoint" in mine._decision


def test_a_wait_that_gives_up_is_part_of_no_cycle():
    """Each polls for a reduction that the other issues only after it has given up."""
    aborted, (mine, other) = pair_of_watches()
    for watch, channel in ((mine, "reduce"), (other, "gathers")):
        watch._awaited = WaitRecord(channel, watch.issue(channel), BOTH, channel, 0.0, on_stream=True, gives_up=True)
    look_at_both(mine, other)
    other._awaited = WaitRecord("gathers", 1, BOTH, "a gather", 0.0, on_stream=True)
    look_at_both(mine, other)
    assert not aborted.is_set()


def test_a_wait_that_gives_up_ends_when_the_other_rank_has_ended():
    aborted, (mine, other) = pair_of_watches()
    other.post_exit_notice()

    def poll():
        assert aborted.wait(60), "nobody ended the poll"

    with pytest.raises(CommunicationError, match="rank 1 has ended while this rank waits for the reduction"):
        mine.wait(poll, "reduce", 1, "the reduction", BOTH, on_stream=True, gives_up=True)


def test_a_driver_that_does_not_respond_is_queried_again():
    """CUDA refuses questions about events while another thread captures a graph."""
    aborted, (mine, other) = pair_of_watches()
    reached = Reached()
    reached.query = broken
    mine.follow(reached, "gathers", mine.issue("gathers"), "a gather", BOTH)
    other.post_exit_notice()
    for _ in range(2):
        assert mine.look_after_long_wait()
    del reached.query
    time.sleep(0.21)
    assert not mine.look_after_long_wait() and aborted.is_set()


def test_stream_waits_are_not_kept_without_a_check():
    aborted, (mine, other) = pair_of_watches()
    other.post_exit_notice()
    mine.follow(Reached(), "gathers", 1, "a gather", BOTH)
    assert aborted.wait(60)
    mine._thread.join(60)
    for number in range(10):
        mine.follow(Reached(), "gathers", number, "a gather", BOTH)
    assert not mine._on_device


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_whose_function_has_returned(tmp_path):
    """Before Python 3.13 such a process ends without the functions of ``atexit``."""
    mine, jobs = Watch(torch_dist.FileStore(str(tmp_path / "store"), 2), "here", 0, 2), []

    def run():
        jobs.append(Watch(torch_dist.FileStore(str(tmp_path / "store"), 2), "here", 1, 2))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    mine.follow(Reached(), "gathers", 2, "a gather", BOTH)
    look_at_both(mine, mine, 2)
    with pytest.raises(CommunicationError, match="rank 1 has ended while this rank waits for a gather"):
        mine.wait(lambda: None, "step", 1, "the update", BOTH)


def test_a_process_that_died():
    aborted, (mine, other) = pair_of_watches()
    child = subprocess.Popen(["sleep", "600"])
    boot, _, _ = json.loads(this_process())
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    other.store.set(other._key("process/1"), json.dumps([boot, child.pid, started]))
    assert not has_ended(this_process())
    mine.follow(Reached(), "gathers", mine.issue("gathers"), "a gather", BOTH)
    look_at_both(mine, mine, 1)
    assert not aborted.is_set()
    child.kill()
    look_at_both(mine, mine, 2)  # ended, and nobody has asked how
    assert aborted.is_set()
    with pytest.raises(CommunicationError, match="process of rank 1 has died .* while rank 0 waits for a gather"):
        mine.wait(lambda: None, "step", 1, "the update", BOTH)
    child.wait()
    assert has_ended(json.dumps([boot, child.pid, started]))
    assert not has_ended(json.dumps(["another machine", child.pid, started]))


def test_a_rank_that_had_issued_what_is_awaited_is_not_blamed():
    _, (mine, other) = pair_of_watches()
    other.issue("gathers")
    other.post_exit_notice()
    mine._patience = 0.2
    with pytest.raises(CommunicationError, match="probably died"):
        mine.wait(broken, "gathers", 1, "the gather of a", BOTH)


def test_a_broken_connection_is_explained_by_the_exit_note_or_the_error_and_only_when_waited_for():
    _, (mine, other) = pair_of_watches()
    mine._patience = 0.2  # it is seconds otherwise
    with pytest.raises(CommunicationError) as raised:
        mine.wait(broken, "gathers", 1, "the gather of a", BOTH)
    texts = "waiting for the gather of a failed; a peer has probably died or timed out: Connection closed by peer"
    assert str(raised.value) == f"{texts} [10.0.0.1]:99."
    with pytest.raises(CommunicationError, match="probably died"):
        mine.wait(broken, "gathers", 1, "the gather of a", BOTH)
    assert mine._patience == 0
    other.post_exit_notice()
    with pytest.raises(CommunicationError, match="rank 1 has ended"):
        mine.wait(broken, "gathers", 1, "the gather of a", BOTH)


def test_exit_waits_for_a_store_read_in_progress():
    """A thread that was still inside torch took the process down (SIGABRT) after the error had been caught."""
    aborted, (mine, other) = pair_of_watches()
    mine.aborts[1] = lambda: time.sleep(0.5)  # what torch needs to close its connections
    other.post_exit_notice()

    with pytest.raises(CommunicationError, match="rank 1 has ended"):
        mine.wait(broken_by(aborted), "gathers", 1, "the gather of a", BOTH)
    assert mine._thread is not None and mine._thread.is_alive()
    mine.post_exit_notice()
    assert not mine._thread.is_alive()


def test_groups_are_aborted_together():
    """NCCL's abort of one communicator returns when the kernel of another one has ended, which its abort ends."""
    _, (mine, other) = pair_of_watches()
    has_ended_kernel, aborted = threading.Event(), threading.Event()

    def abort_of_an_idle_one():
        assert has_ended_kernel.wait(20), "the communicator with the kernel was not aborted"
        aborted.set()

    mine.aborts = {0: abort_of_an_idle_one, 1: has_ended_kernel.set}
    other.post_exit_notice()

    with pytest.raises(CommunicationError, match="rank 1 has ended"):
        mine.wait(broken_by(aborted), "gathers", 1, "the gather of a", BOTH)


def test_groups_that_cannot_be_aborted_are_left_behind_with_a_line(monkeypatch):
    lines, never = [], threading.Event()
    monkeypatch.setattr(watch_module.logger, "warning", lines.append)
    watch_module.run_together([lambda: None, lambda: bool(never.wait(20))], 0.05)
    never.set()
    assert lines == ["1 of 2 process group(s) were not aborted within 0.05 s"]


def test_one_number_for_two_transfers():
    """Both have issued something under the number that the other waits for, but not the same."""
    aborted, (mine, other) = pair_of_watches()
    for watch, key in ((mine, 7), (other, 8)):
        assert watch.issue("gathers", 5) == 1
        assert watch.issue("gathers", key) == 2

    texts = []

    def wait_for_the_other_one():
        with pytest.raises(DivergenceError) as raised:
            other.wait(broken_by(aborted), "gathers", 2, "the gather of b", BOTH)
        texts.append(str(raised.value))

    thread = threading.Thread(target=wait_for_the_other_one)
    thread.start()
    with pytest.raises(DivergenceError) as raised:
        mine.wait(broken_by(aborted), "gathers", 2, "the gather of a", BOTH)
    thread.join()
    assert "rank 0 waits for the gather of a; rank 1 waits for the gather of b" in str(raised.value)
    assert texts == [str(raised.value)]


def test_only_the_latest_keys_are_kept():
    watch = pair_of_watches()[1][0]
    for number in range(1, 5001):
        assert watch.issue("gathers", number * 3) == number
    assert len(watch._keys["gathers"]) < 5000 and watch._key_of("gathers", 5000) == 15000


def _same_ranks_in_two_groups():
    transports = [Job.adopt().axis_of(group).transport() for group in (None, torch_dist.new_group([0, 1]))]
    assert transports[0].watch is transports[1].watch
    channels = [transport.issue("gather")[0] for transport in transports]
    assert len(set(channels)) == 2, channels
    torch_dist.barrier()  # a rank that ended before another had connected would break that one's new group
    return channels


def test_groups_of_the_same_ranks_do_not_share_channels():
    first, second = run_ranks(_same_ranks_in_two_groups, 2)
    assert first == second


def test_a_watch_that_is_stopped_logs_nothing_at_the_end(monkeypatch):
    entries = []
    monkeypatch.setattr(atexit, "register", entries.append)
    monkeypatch.setattr(atexit, "unregister", entries.remove)
    _, watches = pair_of_watches()
    assert len(entries) == 2
    for watch in watches:
        watch.stop()
    assert entries == []


FULL = {"check": 1, "channel": "gathers", "index": 1, "members": "0:1:1", "label": "a", "issued": {}, "key": None}
WRONG_POSTS = [
    "[]", "7", "null", '"text"', "true", "not JSON", "", "{}", "[" * 5_000, '{"has_left": true}',
    '{"members": "0:1:1"}',
    *(json.dumps({**FULL, name: value}) for name in FULL for value in ([[]], {"a": []}, "x", 1.5)
      if not (isinstance(value, str) and name in ("channel", "label"))),
    json.dumps({**FULL, "members": "0:99:99"}), json.dumps({"has_left": 1, "issued": {}}),
]  # fmt: skip


def test_wrong_posts_do_not_end_the_watch_and_are_reported_once(monkeypatch):
    warned = []
    monkeypatch.setattr(posts.logger, "warning", warned.append)
    aborted, (mine, other) = pair_of_watches()
    mine._awaited = WaitRecord("gathers", 1, BOTH, "the gather of a", time.monotonic() - 1.0)
    for post in WRONG_POSTS:
        mine.store.set(mine._key(1), post)
        mine.store.set(mine._key("process/1"), post)
        assert mine.look_after_long_wait(), post
        assert mine._reason(mine._awaited, 0.0) == (None, "")
    assert len(warned) == 1 and "rank 0: the entry of rank 1 in the rendezvous store" in warned[0]
    other.post_exit_notice()
    assert not mine.look_after_long_wait() and aborted.is_set()  # it still watches


def test_what_others_post_cannot_write_to_the_terminal():
    _, (mine, other) = pair_of_watches()
    other.post_failure("it \x1b[2J failed\x07")
    with pytest.raises(CommunicationError, match=r"it \?\[2J failed\?"):
        mine.wait(broken, "gathers", 1, "the gather of a", BOTH)


@pytest.mark.parametrize(("cycle", "looks"), [((0, 1), 1), ((1, 2), 2)])
def test_a_cycle_counts_once_its_ranks_have_checked_again(cycle, looks):
    """One look that is read twice reports nothing; of a cycle of other ranks two are needed."""
    watch = Watch(torch_dist.HashStore(), "here", 0, 3)

    def seen(check):
        return watch._is_still_there({rank: {"channel": "c", "index": 1, "check": check} for rank in cycle})

    assert not any(seen(5) for _ in range(4))
    assert [seen(5 + number) for number in range(1, looks + 1)] == [False] * (looks - 1) + [True]
