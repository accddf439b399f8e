"""In which dtype gradients are added up, when they are divided, and who may leave one out."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.comm.host.gloo import GlooTransport
from deepspeed.errors import CallOrderError
from deepspeed.zero.storage import StorageKind
from tests.engine.support import WIDTH, engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters

# prescale_gradients and gradient_predivide_factor: the mean stays the mean, only the moment of the division moves.
#
# The moment shows in what travels: the transport is asked for gradients that are divided already, and for a smaller
# division afterwards.


def _train(stage, monkeypatch, **config):
    """Masters after two steps, and per reduction (largest element sent, factor applied afterwards)."""
    sent = []
    for name in ("reduce_scatter", "all_reduce"):
        original = getattr(GlooTransport, name)

        def spying(self, source, out, how, _original=original):
            sent.append((source.abs().max().item(), how.scale))
            return _original(self, source, out, how)

        monkeypatch.setattr(GlooTransport, name, spying)
    engine = engine_of(tower(), stage, **config)
    for step in range(2):
        engine.backward(engine(inputs(step, rank())))
        engine.step()
    monkeypatch.undo()
    return full_masters(engine), sent


def _compare(stage, ranks):
    with pytest.MonkeyPatch.context() as patch:
        plain, whole = _train(stage, patch)
        before, divided = _train(stage, patch, prescale_gradients=True)
        parts, halved = _train(stage, patch, gradient_predivide_factor=2.0)
    assert {scale for _, scale in whole} == {1 / ranks}
    assert {scale for _, scale in divided} == {1.0}
    assert {scale for _, scale in halved} == {2 / ranks}
    first = len(whole) // 2  # later steps start from rounded weights
    for (all_of_it, _), (some, _), (half, _) in zip(whole[:first], divided[:first], halved[:first], strict=True):
        assert some == pytest.approx(all_of_it / ranks, rel=1e-6)
        assert half == pytest.approx(all_of_it / 2, rel=1e-6)
    exact = ranks in (1, 2, 4)  # a division by a power of two rounds nothing
    for other in (before, parts):
        assert_states_equal(other, plain, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


@on_ranks(2, 3)
def test_the_step_is_the_same_and_the_division_moves(ranks):
    for stage in range(4):
        _compare(stage, ranks)


# Many small gradients in 16 bit: the sum over micro-batches is kept in fp32.


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


# ``ignore_unused_parameters: false``: decided at the update, on all ranks alike, for what is trained now.


class Branches(nn.Module):
    """Two linears, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        y = self.always(x)
        return (y + self.sometimes(x) if both else y).square().mean()


def strict(stage: int) -> None:
    zero = {"ignore_unused_parameters": False, "stage3_param_persistence_threshold": 0}
    rank = dist.get_rank()
    engine = engine_of(Branches(), stage, zero=zero, accumulation=2)
    for micro in range(2):  # the update has everything, the first micro-batch has not
        engine.backward(engine(inputs(micro, rank), micro == 1))
        engine.step()
    for micro in range(2):  # one rank has everything
        engine.backward(engine(inputs(micro, rank), rank == 0 or stage == 3))
        engine.step()
    before = engine.module.always.weight.sum().item() if stage < 3 else 0.0
    for _ in range(2):
        engine.backward(engine(inputs(5, rank), False))
        if engine.is_gradient_accumulation_boundary():
            with pytest.raises(CallOrderError, match="on any rank: sometimes.weight, sometimes.bias"):
                engine.step()
        else:
            engine.step()
    assert stage == 3 or engine.module.always.weight.sum().item() == before
    for parameter in engine.module.sometimes.parameters():
        parameter.requires_grad_(False)  # as the message advises
    engine.backward(engine(inputs(6, rank), False))
    engine.step()
    assert engine.global_steps == 3
    engine.destroy()


@on_ranks(2)
def test_unused_parameters_are_refused_alike_on_all_ranks() -> None:
    stages = (1, 2, 3)
    for stage in stages:
        strict(stage)
