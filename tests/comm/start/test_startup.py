"""What ranks tell each other before they start, and the ones that do not match."""

import os
import time
from dataclasses import replace

import pytest
import torch

import deepspeed
import deepspeed.comm as dist
import deepspeed.engine  # it takes seconds on a busy machine, and calls are timed here
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.start import startup
from deepspeed.comm.start.startup import RankInfo, compare_facts, rank_map
from deepspeed.errors import CommunicationError, DeepSpeedConfigError, DivergenceError
from deepspeed.ports import free_port
from tests.harness import run_ranks

FACTS = RankInfo("a", 1, 0, "cuda", 4, "1.0", "nccl")


def test_equal_ranks_match():
    assert compare_facts([FACTS, replace(FACTS, local_rank=1, pid=2)]) is None


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("version", "0.9", "version of deepspeed differs .*: rank 2 .host b. has 0.9; the other 3 rank.s. have 1.0"),
        ("device", "cpu", "accelerator differs .*: rank 2 .host b. has cpu; .* check the drivers"),
        ("backend", "gloo", "backend differs .*: rank 2 .host b. has gloo"),
        ("device_count", 3, "number of visible devices differs .*: rank 2 .host b. has 3; the other 3 rank.s. have 4"),
    ],
)
def test_the_rank_that_differs_is_named(field, value, text):
    import re

    ranks = [FACTS] * 4
    ranks[2] = replace(FACTS, host="b", **{field: value})
    decision = compare_facts(ranks)
    assert decision is not None and re.search(text, decision)


def test_machines_of_different_size_are_fine_with_a_rank_per_device():
    small = replace(FACTS, host="b", device_count=1)
    large = replace(FACTS, device_count=2)
    assert compare_facts([large, large, small]) is None
    assert compare_facts([large, small]) is not None  # a device without a rank, or a rank that misses a device


def test_rank_map():
    lines = rank_map([FACTS, replace(FACTS, local_rank=1, pid=2), replace(FACTS, host="b", pid=3)])
    assert lines == [
        "rank map: 3 rank(s) on 2 host(s), cuda, backend nccl",
        "  a: rank 0 (local 0, pid 1), 1 (local 1, pid 2)",
        "  b: rank 2 (local 0, pid 3)",
    ]


def differing(field, value, port):
    """Rank 2 of 3 has another value; returns what each was told, and after how long."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    accelerator = get_accelerator()
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "2":
            target = startup if field == "VERSION" else accelerator
            patch.setattr(target, field, value if field == "VERSION" else lambda: value)
        started = time.monotonic()
        with pytest.raises(CommunicationError) as raised:
            dist.init_distributed("gloo")
    assert not dist.is_initialized()
    return str(raised.value), time.monotonic() - started


@pytest.mark.parametrize(("field", "value"), [("VERSION", "0.0.1"), ("device_count", 7)])
def test_a_rank_that_does_not_match_is_named_on_all_ranks(field, value):
    outcomes = run_ranks(differing, 3, field, value, free_port(), backend=None)
    words = {text for text, _ in outcomes}
    assert len(words) == 1 and f"has {value}; the other 2 rank(s)" in words.pop()
    assert max(seconds for _, seconds in outcomes) < 60


def configs():
    """Several configurations that only one rank has, one after the other, then a common one."""
    rank = dist.get_rank()
    reasons = []
    base = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    for own in (
        {"zero_optimization": {"stage": 2}},
        {"optimizer": {"type": "Adam", "params": {"lr": 0.2}}},
        {"train_batch_size": 5},
    ):
        model = torch.nn.Linear(2, 2)
        started = time.monotonic()
        with pytest.raises(DeepSpeedConfigError) as raised:
            deepspeed.initialize(model=model, config={**base, **(own if rank == 1 else {})})
        reasons.append(str(raised.value))
        assert time.monotonic() - started < 60
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CommunicationError) as strange:
        patch.setenv("DS_RUN_ID", f"run{rank}")  # torch's own rendezvous has let both in
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config=base)
    reasons.append(str(strange.value))
    batching = {"enabled": False, "verbose": rank == 0}
    own_affairs = {
        "steps_per_print": 7 + rank,
        "wall_clock_breakdown": rank == 1,
        "aio": {"queue_depth": 1 + rank},
        "activation_checkpointing": {"profile": rank == 0, "number_checkpoints": 1 + rank},
        "data_efficiency": {"data_sampling": {"num_workers": rank, "dynamic_batching": batching}},
    }
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config={**base, **own_affairs})
    engine.destroy()
    return reasons


def test_a_rank_with_another_configuration_is_named_on_all_ranks():
    first, second = run_ranks(configs, 2)
    assert first[:2] == second[:2] and first.pop() == (strange := second.pop())
    assert "belong to different runs: rank 0" in strange and "belongs to run run1" in strange
    assert "zero_optimization.stage 2 instead of 0" in first[0] and "rank 1 (host " in first[0]
    assert "optimizer.params.lr 0.2 instead of 0.1" in first[1]
    assert "train_batch_size: 5 does not fit" in second[2] and second[2].startswith("the configuration cannot be used")
    assert first[2].startswith("the configuration cannot be used on every rank: rank 1 (host ") and "5 does" in first[2]


def models():
    """Models that only one rank has, one after the other, then a common one."""
    odd = dist.get_rank() == 1
    reasons = []
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}

    def build(width=4, layers=2, frozen=False, tied=False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        model[0].weight.requires_grad = not frozen
        if tied:
            model[1].weight = model[0].weight
        return model, torch.optim.Adam(model.parameters())

    for own in ({"width": 6}, {"layers": 3}, {"frozen": True}, {"tied": True}):
        model, optimizer = build(**(own if odd else {}))
        started = time.monotonic()
        with pytest.raises(DivergenceError) as raised:
            deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        reasons.append(str(raised.value))
        assert time.monotonic() - started < 60
    model, optimizer = build()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.destroy()
    return reasons


def test_a_rank_with_another_model_is_named_on_all_ranks():
    first, second = run_ranks(models, 2)
    assert first == second
    wider, deeper, frozen, tied = first
    assert "has 0.weight: shape (6, 6), float32, trained, in param group 0, rank 0" in wider
    assert "has 0.weight: shape (4, 4)" in wider and "Build the same model on every rank" in wider
    assert wider.startswith("the model differs between the ranks: rank 1 (host ")
    assert "has 2.weight: shape (4, 4)" in deeper and "has optimizer: Adam" in deeper
    assert "0.weight: shape (4, 4), float32, frozen, in param group 0" in frozen
    assert "has 1.weight: the same parameter as 0.weight" in tied
