"""Pipelines whose packets fill the sockets between the stages."""

import time
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed.comm.host import message_queue
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from tests.harness import on_ranks
from tests.harness.pool import run_ranks
from tests.parallel.pipe.test_never_hang import SOON, raised_by

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


def items(*rows: int) -> list[tuple[torch.Tensor, ...]]:
    made = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(number, 4, generator=made) for _ in range(2)) for number in rows]


def mean_square(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).square().sum() / ROWS  # of no rows too


def engine_of(
    layers: list[Any], stages: int, count: int, schedule: str, loss_fn: Any = mean_square, room: int = 1 << 17
) -> Any:
    """Its sockets hold a handful of packets, or, with too little ``room``, are not used."""
    torch.manual_seed(0)
    module = PipelineModule(layers, num_stages=stages, loss_fn=loss_fn, partition_method="uniform", schedule=schedule)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
    }
    before, message_queue._SOCKET_BYTES = message_queue._SOCKET_BYTES, room
    try:
        return deepspeed.initialize(model=module, config=config)[0]
    finally:
        message_queue._SOCKET_BYTES = before


def _tied(stages: int, count: int) -> list[float]:
    """The last stage is ready long before the first one, and waits for it elsewhere than at its mail."""
    first, last = (TiedLayerSpec("tie", nn.Linear, 4, 4) for _ in range(2))
    engine = engine_of([first, Slow(0.01), nn.Tanh(), last], stages, count, "gpipe")
    return [engine.train_batch(iter(items(*[ROWS] * count))).item() for _ in range(2)]


def test_a_stage_that_is_ready_sends_on_while_it_waits_elsewhere():
    alone = run_ranks(_tied, 1, 1, 20)
    assert run_ranks(_tied, 2, 2, 20) == 2 * alone
    assert run_ranks(_tied, 4, 2, 20) == 4 * alone  # copies of the model have the same samples here


def _without_a_queue(stages: int) -> list[float]:
    """As between stages on different hosts: descriptions go over gloo too."""
    engine = engine_of([nn.Linear(4, 4), nn.Tanh()], stages, 3, "1f1b", room=4096)
    assert stages == 1 or engine._interpreter.channels._queue is None
    return [engine.train_batch(iter(items(*[ROWS] * 3))).item() for _ in range(2)]


def test_stages_without_a_message_queue():
    assert run_ranks(_without_a_queue, 2, 2) == 2 * run_ranks(_without_a_queue, 1, 1)


# Packets of nearly and exactly 64 KiB, tensors that are too long for one, and none: after each other in any order.
SHAPES = [*[ROWS] * 20, *[4094, 4095] * 4, 4095, 4095, 4095, 0, 0, 0, 1, ROWS, ROWS, *[4094] * 25]


def _all_schedules(stages: int) -> dict[str, list[float]]:
    """Two engines at a time take turns, in training and in evaluation, where nothing travels back."""
    result = {}
    for pair in (("gpipe", "1f1b"), ("zbv", "dualpipev"), ("interleaved", "zb-h1")):
        engines = {}
        for name in pair:
            engines[name] = engine_of([nn.Linear(4, 4) for _ in range(4)], stages, len(SHAPES), name)
        for name in engines:
            result[name] = []
        for _ in range(2 if "gpipe" in pair else 1):
            for name, engine in engines.items():
                result[name].append(engine.train_batch(iter(items(*SHAPES))).item())
            for name, engine in engines.items():
                evaluated = engine.eval_batch(iter(items(*SHAPES[:40])), num_micro_batches=40)
                result[name].append(evaluated.item())
    return result


def test_every_schedule_is_as_one_stage_when_sockets_are_full():
    (alone,) = run_ranks(_all_schedules, 1, 1)
    for result in run_ranks(_all_schedules, 2, 2):
        for name, losses in result.items():
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone[name]), rtol=1e-6, atol=0), name


class Raises:
    """A loss function that takes its time and has had enough of the tenth."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        self.calls += 1
        if self.calls == 10:
            raise ArithmeticError("no such loss")
        return mean_square(outputs, labels)


@on_ranks(3)
def test_a_loss_that_fails_while_sockets_are_full_raises_on_all_ranks() -> None:
    engine = engine_of([nn.Linear(4, 4) for _ in range(3)], 3, 30, "gpipe", Raises())
    text, seconds = raised_by(lambda: engine.train_batch(iter(items(*[ROWS] * 30))))
    assert text.startswith("PipelineError: train_batch: stage 2 (rank 2)") and "no such loss" in text, text
    assert seconds < SOON
