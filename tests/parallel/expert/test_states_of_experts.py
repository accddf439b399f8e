"""Buffers and extra states of spread experts: each expert keeps its own, and checkpoints have those of all."""

import tempfile
from typing import Any

import torch
from torch import nn

from deepspeed.moe.layer import MoE
from tests.engine.support import WIDTH, engine_of, rank
from tests.harness import run_ranks


class Counting(nn.Linear):
    """An expert with a buffer and an extra state."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("number", torch.zeros(2, 3).t())
        self.note = "none"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def _make(ep_size: int) -> tuple[Any, list[Counting]]:
    model = nn.Sequential(MoE(WIDTH, Counting(), 2, ep_size))
    experts: list[Any] = list(model[0].deepspeed_moe.experts.deepspeed_experts)
    for local, expert in enumerate(experts):
        number = rank() % ep_size * len(experts) + local
        expert.number.fill_(number + 10 * (rank() // ep_size))  # the first rank that holds the expert counts
        expert.note = f"expert {number}"
    return engine_of(model, 1), experts


def _found(experts: list[Counting]) -> list[Any]:
    return [(expert.number.unique().tolist(), expert.note) for expert in experts]


def _save(folder: str) -> list[Any]:
    engine, experts = _make(2)
    begun = _found(experts)
    engine.save_checkpoint(folder)
    for expert in experts:
        expert.number.zero_()
        expert.note = "none"
    engine.load_checkpoint(folder)
    assert _found(experts) == begun
    return begun


def _load(folder: str) -> list[Any]:
    engine, experts = _make(1)
    for expert in experts:
        expert.number.fill_(7)
        expert.note = "none"
    engine.load_checkpoint(folder)
    return _found(experts)


def test_each_expert_keeps_its_buffers_and_extra_state():
    with tempfile.TemporaryDirectory() as folder:
        first, second = ([0.0], "expert 0"), ([1.0], "expert 1")
        assert run_ranks(_save, 4, folder) == [[first], [second], [first], [second]]
        assert run_ranks(_load, 1, folder) == [[first, second]]
