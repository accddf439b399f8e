"""Many small gradients in 16 bit: the sum over micro-batches is kept in fp32."""

import pytest
import torch
from torch import nn

from deepspeed.zero.storage import StorageKind
from tests.engine.support import engine_of, rank
from tests.harness import run_ranks
from tests.zero.reading import full_masters

MICRO_BATCHES = 256
NUMEL = 512


class Weighted(nn.Module):
    """Its gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, x):
        return (self.weight.float() * x).sum()


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def _input(micro, of_rank):
    generator = torch.Generator().manual_seed(1000 * of_rank + micro)
    return 1e-3 * (1 + torch.rand(NUMEL, generator=generator))


def _accumulate(stage, precision, **config):
    """The relative error of the update after 256 micro-batches, against fp64."""
    engine = engine_of(Weighted(), stage, optimizer=_sgd, accumulation=MICRO_BATCHES, **precision, **config)
    for micro in range(MICRO_BATCHES):
        engine.backward(engine(_input(micro, rank())), scale_wrt_gas=False)
        engine.step()
    ranks = torch.distributed.get_world_size()
    truth = sum(_input(m, r).double() for m in range(MICRO_BATCHES) for r in range(ranks)) / ranks
    found = -full_masters(engine)["weight"].double()
    return ((found - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_256_tiny_micro_batches(stage, ranks):
    """Each gradient is rounded to bf16 once; their sum is not (in bf16 it would be off by a fifth)."""
    for error in run_ranks(_accumulate, ranks, stage, {"bf16": {"enabled": True}}):
        assert error < 1e-3, error


@pytest.mark.parametrize("stage", [0, 2])
def test_fp16(stage):
    precision = {"fp16": {"enabled": True, "loss_scale": 1024}}
    for error in run_ranks(_accumulate, 2, stage, precision):
        assert error < 1e-3, error


@pytest.mark.parametrize("stage", [0, 2])
def test_the_setting_makes_the_sum_bf16(stage):
    """The setting takes effect: with a bf16 accumulator small gradients are lost."""
    precision = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    for error in run_ranks(_accumulate, 2, stage, precision):
        assert error > 0.05, error


def _buffers(stage):
    """Gradient bytes after the only micro-batch of a step, and after the first of two."""
    found = []
    for accumulation in (1, 2):
        engine = engine_of(Weighted(), stage, optimizer=_sgd, accumulation=accumulation, bf16={"enabled": True})
        engine.backward(engine(_input(0, rank())))
        found.append(
            engine._runtime.memory_tracker.live(StorageKind.GRADIENT)
            + engine._runtime.memory_tracker.live(StorageKind.GRADIENT_BUCKET)
        )
    return found


def test_without_accumulation_there_is_no_accumulator():
    """One rank: the bf16 gradient goes straight into the update; two ranks: the reduced fp32 shard does."""
    assert run_ranks(_buffers, 1, 1)[0][0] == 2 * NUMEL
    for stage, share in ((0, 1), (1, 2), (2, 2), (3, 2)):
        once, _ = run_ranks(_buffers, 2, stage)[0]
        assert once == 4 * NUMEL // share, (stage, once)
