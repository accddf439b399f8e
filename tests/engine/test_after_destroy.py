"""What is left of an engine that was destroyed: nothing but its model, and nothing of that once it is dropped."""

from __future__ import annotations

import gc
import os
import weakref

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

import deepspeed
from deepspeed.moe.layer import MoE
from tests.harness import run_ranks


class _KeepsItsLoss(torch.nn.Module):
    """As many models do: the tensor's graph keeps the parameters, where no collector sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 8)
        expert = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        self.experts = MoE(8, expert, num_experts=4, ep_size=2, k=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, self.balance, _ = self.experts(self.first(x))
        return y.sum() + self.balance


def _trained_and_destroyed(stage: int) -> tuple[weakref.ref[torch.nn.Module], tuple[int, int, int]]:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    model = _KeepsItsLoss()
    engine = deepspeed.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 8)))
        engine.step()
    engine.destroy()
    held = (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(_world.pg_map))
    return weakref.ref(model), held


def _many() -> None:
    for stage in (1, 2, 3):
        held = []
        for _ in range(3):
            model, now = _trained_and_destroyed(stage)
            gc.collect()
            assert model() is None, stage
            held.append(now)
        # Descriptors, threads and process groups of the second one serve the third.
        assert held[1] == held[2], (stage, dist.get_rank(), held)


def test_engines_one_after_the_other_leave_nothing_behind():
    run_ranks(_many, 2)
