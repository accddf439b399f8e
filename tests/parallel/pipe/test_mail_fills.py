"""Pipelines whose packets fill the sockets between the stages."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.comm import mail
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from tests.harness.pool import run_ranks

ROWS = 4000  # of four numbers: a packet of nearly 64 KiB


class Slow(nn.Module):
    """A layer whose backward takes long."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: time.sleep(self.seconds))
        return out


def items(count: int) -> list[tuple[torch.Tensor, ...]]:
    made = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(ROWS, 4, generator=made) for _ in range(2)) for _ in range(count)]


def mean_square(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().mean()


def engine_of(layers: list[Any], stages: int, count: int, schedule: str) -> Any:
    """Its sockets hold a handful of packets."""
    torch.manual_seed(0)
    module = PipelineModule(
        layers, num_stages=stages, loss_fn=mean_square, partition_method="uniform", schedule=schedule
    )
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    }
    before, mail._ROOM = mail._ROOM, 1 << 17
    try:
        return deepspeed.initialize(model=module, config=config)[0]
    finally:
        mail._ROOM = before


def _tied(stages: int, count: int) -> list[float]:
    """The last stage is ready long before the first one, and waits for it elsewhere than at its mail."""
    first, last = (TiedLayerSpec("tie", nn.Linear, 4, 4) for _ in range(2))
    engine = engine_of([first, Slow(0.01), nn.Tanh(), last], stages, count, "gpipe")
    return [engine.train_batch(iter(items(count))).item() for _ in range(2)]


def test_a_stage_that_is_ready_sends_on_while_it_waits_elsewhere():
    alone = run_ranks(_tied, 1, 1, 20)
    assert run_ranks(_tied, 2, 2, 20, timeout=30) == 2 * alone
    assert run_ranks(_tied, 4, 2, 20, timeout=30) == 4 * alone  # copies of the model have the same samples here
