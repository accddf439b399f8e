"""What the start of thousands of ranks costs at the store: messages of rank 0, which all others wait for."""

from __future__ import annotations

import json
import re
from datetime import timedelta

import pytest
import torch.distributed as torch_dist

from deepspeed.comm.start import admission, startup
from deepspeed.comm.start.admission import JoiningProcess, RendezvousPoint, receive_ranks
from deepspeed.comm.start.batched_store import read_many, those_there, write_many
from deepspeed.comm.start.startup import RankInfo
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


def play(ranks, monkeypatch):
    """Rank 0's part, with all the others already there; returns (messages, bytes, read by another rank)."""
    store = CountingStore()
    identity = "0" * 32
    monkeypatch.setattr(admission.uuid, "uuid4", lambda: type("Fixed", (), {"hex": identity}))
    point = RendezvousPoint(identity, joining(0, ranks))
    for rank in range(1, ranks):
        store.store.set(point.key(f"arrival/{rank}"), joining(rank, ranks).to_json())
    store.store.add(point.key("arrivals"), ranks - 1)
    prefix, facts = receive_ranks(store, joining(0, ranks), "here", timedelta(seconds=60))
    assert len(facts) == ranks
    answer = json.loads(store.store.get(point.key(f"answer/{ranks - 1}")))
    assert answer == {"prefix": prefix}
    return store.messages, store.bytes


@pytest.mark.parametrize("ranks", [4096, pytest.param(16384, marks=pytest.mark.slow)])
def test_rank_0_needs_few_messages_however_many_ranks_there_are(ranks, monkeypatch):
    messages, total = play(ranks, monkeypatch)
    few, _ = play(64, monkeypatch)
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


def test_a_store_without_calls_for_many_is_asked_for_each(tmp_path):
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
