"""An engine that nobody refers to is freed with everything below it: memory, threads, sockets of its process group."""

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

from deepspeed.engine import initialize
from tests.harness import run_ranks


def _use_and_drop(stage):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine, _, _, _ = initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
    dropped = [weakref.ref(engine), weakref.ref(engine.optimizer), weakref.ref(model)]
    del engine, model
    gc.collect()
    return [reference() is None for reference in dropped]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_nothing_is_left(stage):
    for ranks in (1, 2):
        assert run_ranks(_use_and_drop, ranks, stage) == [[True, True, True]] * ranks


def _watching_threads(most):
    """Returns how many there are, once there are at most ``most`` or a minute is over."""
    deadline = time.monotonic() + 60
    while (found := sum(thread.name == "deepspeed-watch" for thread in threading.enumerate())) > most:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)  # a watching thread ends after its pause
    return found


def test_watching_threads_end_with_their_group():
    for _ in range(4):
        run_ranks(_use_and_drop, 2, 3)
    assert run_ranks(_watching_threads, 2, 0) == [0, 0]
