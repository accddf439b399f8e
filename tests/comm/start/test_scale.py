"""What the start of thousands of ranks costs at the store: messages of rank 0, which all others wait for."""

import json
import re
import threading
from datetime import timedelta

import pytest
import torch.distributed as torch_dist

from benchmarks.start import SimulatedStore, simulate_start, simulate_wait
from deepspeed.comm.base.batched_store import longest_pause, read_many, those_there, write_many
from deepspeed.comm.start import admission, startup
from deepspeed.comm.start.admission import JoiningProcess, RendezvousPoint, receive_ranks
from deepspeed.comm.start.startup import RankInfo
from deepspeed.comm.watch import watchdog
from deepspeed.comm.watch.posts import PostReader, members_from, members_text
from deepspeed.comm.watch.wait_records import WaitRecord
from deepspeed.comm.watch.watchdog import Watch
from tests.launcher.processes import Launcher


class CountingStore:
    """A store in this process that counts messages and their bytes."""

    def __init__(self) -> None:
        self.store = torch_dist.HashStore()
        self.messages, self.bytes = 0, 0

    def __getattr__(self, name):
        call = getattr(self.store, name)

        def counted(*args):
            found = call(*args)
            self.messages += 1
            self.bytes += sum(_length(each) for each in (*args, found))
            return found

        return call if name in ("has_extended_api", "set_timeout") else counted


def _length(value) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_length, value)) if isinstance(value, list) else 8


def joining(rank, ranks):
    facts = RankInfo(f"node-{rank // 8:05d}", 1000 + rank, rank % 8, "cuda", 8, "1.0.0", "nccl")
    return JoiningProcess(rank, ranks, "Slurm step 4711.0", "python train.py", "0123456789abcdef", 1, facts)


def simulate_post(ranks, monkeypatch):
    """Rank 0's part, with all the others already there; returns (messages, bytes, read by another rank)."""
    store = CountingStore()
    identity = "0" * 32
    monkeypatch.setattr(admission.uuid, "uuid4", lambda: type("Fixed", (), {"hex": identity}))
    point = RendezvousPoint(identity, joining(0, ranks))
    for rank in range(1, ranks):
        store.store.set(point.key(f"arrival/{rank}"), joining(rank, ranks).to_json())
    store.store.add(point.key("arrivals"), ranks - 1)
    prefix, facts, _ = receive_ranks(store, joining(0, ranks), "here", timedelta(seconds=60))
    assert len(facts) == ranks
    answer = json.loads(store.store.get(point.key(f"answer/{ranks - 1}")))
    assert answer == {"prefix": prefix}
    return store.messages, store.bytes


@pytest.mark.parametrize("ranks", [4096, pytest.param(16384, marks=pytest.mark.slow)])
def test_rank_0_needs_few_messages_however_many_ranks_there_are(ranks, monkeypatch):
    messages, total = simulate_post(ranks, monkeypatch)
    few, _ = simulate_post(64, monkeypatch)
    assert messages <= few + 4 * (ranks // 2048) + 2  # one for 2,048 keys
    assert total / ranks < 1000  # bytes per rank


def test_a_comparison_needs_few_messages_too():
    store, ranks = CountingStore(), 4096
    scope = f"{startup._SCOPE}/topic/1"
    for rank in range(1, ranks):
        store.store.set(f"{scope}/{rank}", "same")
    store.store.add(f"{scope}/count", ranks - 1)
    posts, verdict = startup._exchange(store, "topic", 0, ranks, "same", lambda posts: None, timedelta(seconds=60))
    assert (posts, verdict) == (["same"] * ranks, None)
    assert store.messages <= 8


def test_keys_that_are_not_there_are_found_by_halves():
    store = CountingStore()
    names = [f"key{number}" for number in range(1000)]
    write_many(store, {name: name for name in names if name != "key700"})
    store.messages = 0
    assert those_there(store, names) == [name for name in names if name != "key700"]
    assert store.messages < 25
    assert those_there(store, []) == [] and those_there(store, ["key700"]) == []
    assert read_many(store, ["key1", "key2"]) == [b"key1", b"key2"]


def test_a_store_without_calls_for_many_gets_one_call_for_each(tmp_path):
    store = torch_dist.FileStore(str(tmp_path / "store"), 1)
    assert not store.has_extended_api()
    write_many(store, {"a": "1", "b": "2"})
    assert read_many(store, ["a", "b"]) == [b"1", b"2"]


# Counts this rank's calls of the store until the engine is there; polls (check) depend on time, so they stand apart.
COUNTED = """
import collections
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

count, passed = collections.Counter(), [0]

def length(value):
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(length, value)) if isinstance(value, (list, tuple)) else 8

def counted(name, real):
    def call(self, *args):
        found = real(self, *args)
        count[name] += 1
        passed[0] += length(args) + length(found)
        return found
    return call

for cls in (Store, PrefixStore, TCPStore):
    for name in ("get", "set", "add", "wait", "check", "multi_get", "multi_set", "compare_set"):
        if name in cls.__dict__:
            setattr(cls, name, counted(name, cls.__dict__[name]))

import torch, deepspeed
deepspeed.init_distributed()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
zero = {"stage": 3, "zero_hpz_partition_size": 2}
settings = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
engine, *_ = deepspeed.initialize(model=model, config=settings)
polls = count.pop("check")
count.pop("set")  # a rank that has waited for a while posts what it waits for
deepspeed.comm.barrier()
print(json.dumps([sum(count.values()), polls, passed[0]]) + "\\n", end="")
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_start_costs_a_rank_the_same_at_any_number_of_ranks(tmp_path):
    """A real start, with groups along two axes: calls of the store per rank, rank 0 apart."""
    found = {}
    for ranks in (4, 8):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        launcher = Launcher(folder, "import json\n" + COUNTED, f"--num_gpus={ranks}", "--no_local_rank")
        code, out, err = launcher.finish(150)
        assert code == 0, err
        lines = dict(re.findall(r"\[rank (\d+)\] (\[.*\])", out))
        found[ranks] = [json.loads(lines[str(rank)]) for rank in range(ranks)]
    # A rank that waits for long reads what the others wait for, so the least of the ranks tells.
    assert min(calls for calls, _, _ in found[4][1:]) == min(calls for calls, _, _ in found[8][1:]) < 20
    assert max(calls for calls, _, _ in found[8]) < 100


# --- the whole start, and long waits, simulated (benchmarks/start.py) ------------------------------------------------


def test_a_start_costs_operations_in_proportion_to_the_ranks(monkeypatch):
    """Of ranks that wait at the store, as more than a thousand do."""
    for module in (admission, watchdog):
        monkeypatch.setattr(module, "MOST_THAT_POLL", 64)
    few, many = simulate_start(80), simulate_start(240)
    assert few.operations / 80 == pytest.approx(many.operations / 240, rel=0.1)
    assert many.operations / 240 < 60 and many.bytes / 240 < 10_000


def test_ranks_poll_more_rarely_the_more_they_are():
    few = simulate_start(40, spread=20.0)  # most of them wait for the last one for long
    assert few.operations / 40 < 300 and few.seconds < 21
    assert longest_pause(1024, 0.1) * 4_000 == 1024 and longest_pause(8, 0.1) == 0.1


def test_a_simulated_start_takes_no_notice_of_other_threads_of_the_process():
    """An earlier test's watch sleeps by the real time, and gets no turn of the simulated clock."""
    alone, is_over = simulate_start(40), threading.Event()

    def look_again_and_again():
        while not is_over.is_set():
            watchdog.time.sleep(0.001)
            watchdog.time.monotonic()

    other = threading.Thread(target=look_again_and_again)
    other.start()
    try:
        assert simulate_start(40) == alone
    finally:
        is_over.set()
        other.join()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ranks", [4096, 10_000, 16_384])
def test_thousands_of_ranks_start_in_seconds(ranks):
    start = simulate_start(ranks)
    assert start.operations / ranks < 60
    assert start.seconds < 45 * ranks / 10_000, start


def test_ranks_that_wait_for_a_late_one_load_the_store_in_proportion_to_their_number():
    few, many = simulate_wait(80), simulate_wait(320)
    assert few.found_after is None and many.found_after is None
    assert many.operations[-1] < 6 * few.operations[-1]
    assert many.operations[-1] / many.period < 15_000
    assert many.bytes[-1] / many.period < 100e6


def waiting(store, ranks, waits):
    """A watch per rank of a job, each in the wait that ``waits`` gives: (channel, members)."""
    watches = [Watch(store, "job", rank, ranks) for rank in range(ranks)]
    for rank, watch in enumerate(watches):
        if (wait := waits(rank)) is not None:
            channel, members = wait
            watch.issue(channel)
            watch._awaited = WaitRecord(channel, 1, members, f"the transfer of {channel}", float("-inf"))
    return watches


@pytest.fixture
def stopped():
    watches = []
    yield watches.extend
    for watch in watches:
        watch.stop()


def test_a_cycle_among_few_of_many_ranks_is_named_by_whoever_reads_everything(stopped):
    """Only 3 and 150 wait for each other and read nothing: the others wait for 3, and find the cycle."""
    everyone = tuple(range(200))
    waits = {3: ("a", (3, 150)), 150: ("b", (3, 150))}
    watches = waiting(SimulatedStore(), 200, lambda rank: waits.get(rank, ("all", everyone)))
    stopped(watches)
    for rank in waits:
        watches[rank]._reader.read = lambda members, everything: {}
    others = [watch for rank, watch in enumerate(watches) if rank not in (3, 150)]
    for _ in range(120):
        for rank in (3, 150):
            watches[rank].look_after_long_wait()
        if not all(watch.look_after_long_wait() for watch in others):
            break
    (decision, *_) = [watch._decision for watch in others if watch._decision]
    assert "rank 3 waits for the transfer of a; rank 150 waits for the transfer of b" in decision


def test_a_late_rank_of_many_is_no_cycle_and_one_that_has_left_is_named_to_all(stopped):
    everyone = tuple(range(66))
    watches = waiting(SimulatedStore(), 66, lambda rank: None if rank == 65 else ("all", everyone))
    stopped(watches)
    for _ in range(17):  # every rank reads everything at least once
        assert all(watch.look_after_long_wait() for watch in watches[:65])
    watches[65].post_exit_notice()
    for _ in range(17):
        for watch in watches[:65]:
            watch.look_after_long_wait()
    assert all("rank 65 has ended" in (watch._failure or watch._exit_notice or "") for watch in watches[:65])
    assert watches[0].store.count["compare_set"] > 0


def test_a_rank_reads_a_few_posts_of_a_long_wait_and_in_time_all_but_its_own():
    reader, read = PostReader(CountingStore(), str, 5, 100), []
    for _ in range(13):
        read += (posts := reader.read(tuple(range(100)), everything=False))
        assert len(posts) == 8
    assert set(read) == set(range(100)) - {5}


def test_members_of_a_post_are_short_however_many_they_are():
    for ranks in ([], [5], [0, 1], list(range(0, 16_384, 8)), [*range(8), *range(64, 72)], [0, 1, 5, 9, 4], [3, 3]):
        assert members_from(members_text(ranks), 16_384) == tuple(ranks)
    assert len(members_text(range(16_384))) < 20
    for wrong in ("x", "0:5", "0:5:0", "5:0:1", "-1:2:1", "0:99999:1", ",".join(["0:16383:1"] * 2)):
        assert members_from(wrong, 16_384) is None
