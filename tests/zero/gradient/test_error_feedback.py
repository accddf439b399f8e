"""Values that travel as codes: what ranks compute with, what is kept of what is lost, and who keeps it."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.engine import DeepSpeedEngine
from deepspeed.zero.storage import StorageKind
from tests.engine.support import SHARDED, engine_of, inputs, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.harness.logged import logged
from tests.harness.toy_models import tower
from tests.zero.update.rounding import Rounding, rounded_transfers

STEPS = 4


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def make(stage: int, model: nn.Module | None = None, *, feeds_back: bool = True, **settings: Any) -> DeepSpeedEngine:
    with rounded_transfers(Rounding() if stage == 3 else None, Rounding(feeds_back=feeds_back)):
        model = model or tower()
        zero = {**(SHARDED if stage == 3 else {}), **settings.pop("zero", {})}
        settings.setdefault("optimizer", sgd)
        return engine_of(model, stage, zero=zero, **settings)


def rounded(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).float()


class Reference:
    """All ranks in one process: the published arithmetic of a compressed sum, tensor by tensor."""

    def __init__(self, stage: int, ranks: int, accumulation: int, clip: float) -> None:
        self.model = tower()
        self.optimizer = sgd(self.model)
        self.stage, self.ranks, self.accumulation, self.clip = stage, ranks, accumulation, clip
        self.sent = [[torch.zeros_like(p) for p in self.model.parameters()] for _ in range(ranks)]
        self.owned = [torch.zeros_like(p) for p in self.model.parameters()]
        self.exact = 0.0  # largest distance of a sum from the exact one

    def gradients(self, step: int, micro: int, of_rank: int) -> list[torch.Tensor]:
        model = copy.deepcopy(self.model)
        if self.stage == 3 and self.ranks > 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(rounded(parameter))
        (model(inputs(step, micro, of_rank)) / self.accumulation).backward()
        return [parameter.grad for parameter in model.parameters()]

    def combine(self, by_rank: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        if self.ranks == 1:
            return by_rank[0]
        found = []
        for index, error in enumerate(self.owned):
            total = torch.zeros_like(error)
            for of_rank in range(self.ranks):
                due = by_rank[of_rank][index] + self.sent[of_rank][index]
                self.sent[of_rank][index] = due - rounded(due)
                total += rounded(due)
            total *= 1.0 / self.ranks
            self.exact = max(self.exact, (total - sum(g[index] for g in by_rank) / self.ranks).abs().max().item())
            if self.stage == 0:  # the owner sends the sum on
                due = total + error
                self.owned[index], total = due - rounded(due), rounded(due)
            found.append(total)
        return found

    def step(self, step: int) -> float:
        micro_batches = [[self.gradients(step, m, r) for r in range(self.ranks)] for m in range(self.accumulation)]
        if self.stage < 2:  # sums over micro-batches travel once
            summed = [[sum(gs) for gs in zip(*(m[r] for m in micro_batches), strict=True)] for r in range(self.ranks)]
            total = self.combine(summed)
        else:
            total = [sum(gs) for gs in zip(*(self.combine(batch) for batch in micro_batches), strict=True)]
        for parameter, gradient in zip(self.model.parameters(), total, strict=True):
            parameter.grad = gradient
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or math.inf).item()
        self.optimizer.step()
        return norm


def check_private(engine: DeepSpeedEngine, reference: Reference) -> None:
    """The traffic counters have the formula's bytes, and the tensors hold what was lost."""
    rows = {kind: (counted, formula) for kind, counted, formula, _ in engine.memory_report()}
    runtime = engine._runtime
    if reference.ranks == 1:
        assert StorageKind.PRIVATE.value not in rows and runtime.memory_tracker.live(StorageKind.PRIVATE) == 0
        return
    counted, formula = rows[StorageKind.PRIVATE.value]
    psi = sum(master.bucket.layout.numel for master in runtime.masters)
    # Twice: a skipped update leaves it as it was.
    assert counted == formula == (8 * psi if reference.stage else 8 * (psi + psi // reference.ranks))
    names = [name for name, _ in reference.model.named_parameters()]
    for gradients in runtime.reducer.buckets:
        assert gradients.feedback is not None
        layout = gradients.bucket.layout
        for tile, start in zip(layout.tiles, layout.starts, strict=True):
            kept = gradients.feedback.tensor[start : start + tile.numel].view(tile.shape)
            expected = reference.sent[rank()][names.index(tile.name)]
            torch.testing.assert_close(kept, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(("ranks", "stages"), [(1, (0, 3)), (2, (0, 1, 2, 3)), (3, (0, 2, 3))])
@on_ranks()
def test_equals_the_sum_by_hand(ranks: int, stages: tuple[int, ...]) -> None:
    for stage in stages:
        for accumulation, clip in ((1, 0.0), (2, 0.05)):
            reference = Reference(stage, ranks, accumulation, clip)
            engine = make(stage, accumulation=accumulation, gradient_clipping=clip)
            for step in range(STEPS):
                for micro in range(accumulation):
                    engine.backward(engine(inputs(step, micro, rank())))
                    engine.step()
                norm = reference.step(step)
                what = f"stage {stage}, accumulation {accumulation}, step {step}"
                assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-4), what
                found = dict(engine.iter_full("fp32"))
                for name, expected in reference.model.named_parameters():
                    torch.testing.assert_close(found[name], expected.detach(), rtol=1e-4, atol=1e-5, msg=what)
            assert ranks == 1 or reference.exact > 1e-5  # so a sum without codes would have been found out
            check_private(engine, reference)
            engine.destroy()


class Looking(nn.Module):
    """A linear layer that shows what it computes with, and may write to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner = nn.Linear(9, 7)
        self.seen: torch.Tensor | None = None
        self.writes: float | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes is not None:
            with torch.no_grad():
                self.inner.weight[2, 3] = self.writes
        self.seen = self.inner.weight.detach().clone()
        return self.inner(x).square().mean()


def _values(engine: DeepSpeedEngine, kind: str = "param") -> torch.Tensor:
    return dict(engine.iter_full(kind))["inner.weight"].clone()


@on_ranks(2)
def test_everybody_computes_with_the_decoded_values() -> None:
    engine = make(3, Looking())
    module, first = engine.module, _values(engine)
    assert not torch.equal(first, rounded(first))

    # Everybody computes with the decoded values, the owner of a slice too; what is kept is as it was.
    engine.backward(engine(inputs(0, rank())))
    assert torch.equal(module.seen, rounded(first))
    assert same_on_all_ranks(module.seen)
    assert torch.equal(_values(engine), first)

    # A whole step updates the exact values.
    engine.step()
    second = _values(engine)
    assert not torch.equal(second, rounded(second)) and torch.equal(_values(engine, "fp32"), second)

    # A write inside a forward changes what was written and nothing else.
    module.writes = 0.123456
    with torch.no_grad():
        engine(inputs(1, rank()))
    module.writes = None
    expected = second.clone()
    expected[2, 3] = 0.123456
    assert torch.equal(_values(engine), expected) and torch.equal(_values(engine, "fp32"), expected)

    # GatheredParameters shows what is kept, and changes what the block changed.
    with deepspeed.zero.GatheredParameters(module.inner.weight, modifier_rank=0):
        assert torch.equal(module.inner.weight, expected)
        with torch.no_grad():
            module.inner.weight[0, 0] = 7.7
    expected[0, 0] = 7.7
    assert torch.equal(_values(engine), expected)
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        assert torch.equal(module.inner.weight, expected)
    assert torch.equal(_values(engine), expected)


@on_ranks(2)
def test_an_overflow_is_seen() -> None:
    """What is not finite stays visible, and leaves nothing behind; the error has the unit of the gradients."""
    for stage, accumulation in ((0, 1), (2, 1), (2, 2)):
        fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
        engine = make(stage, accumulation=accumulation, fp16=fp16)
        before = _errors(engine)
        for step in range(3):
            for micro in range(accumulation):
                batch = inputs(step, micro, rank())
                if step == 1 and micro == 0 and rank() == 0:
                    batch = batch * math.inf
                engine.backward(engine(batch))
                engine.step()
            assert engine.optimizer.overflow is (step == 1)
            after = _errors(engine)
            if step == 1:  # half the loss scale, so half of what there was: to the bit
                assert all(torch.equal(0.5 * one, other) for one, other in zip(before, after, strict=True))
            else:
                assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
            before = after
        engine.backward(engine(inputs(3, rank())))
        if accumulation == 1:
            engine.zero_grad()  # what is thrown away leaves nothing behind either
            assert all(torch.equal(one, other) for one, other in zip(before, _errors(engine), strict=True))
        if stage == 0:
            engine.destroy()
    kept = [gradients.feedback.tensor.clone() for gradients in engine._runtime.reducer.buckets]
    assert all(bool(one.isfinite().all()) for one in kept)
    engine.optimizer.override_loss_scale(2 * engine.optimizer.loss_scale)
    for one, gradients in zip(kept, engine._runtime.reducer.buckets, strict=True):
        assert torch.equal(2 * one, gradients.feedback.tensor)


def _train(engine: DeepSpeedEngine, steps: range, seed: int) -> None:
    for step in steps:
        engine.backward(engine(inputs(step, seed)))
        engine.step()


def _errors(engine: DeepSpeedEngine) -> list[torch.Tensor]:
    return [gradients.feedback.tensor.clone() for gradients in engine._runtime.reducer.buckets]


def save(folder: str, stages: tuple[int, ...]) -> None:
    for stage in stages:
        engine = make(stage)
        _train(engine, range(2), rank())
        engine.save_checkpoint(f"{folder}/{stage}")
        before = _errors(engine)
        _train(engine, range(2, 4), rank())

        # The same size continues bit for bit, which it does not where the errors are left out.
        again = make(stage, tower(seed=8))
        again.load_checkpoint(f"{folder}/{stage}")
        assert all(torch.equal(one, other) for one, other in zip(before, _errors(again), strict=True))
        _train(again, range(2, 4), rank())
        expected, found = dict(engine.iter_full("fp32")), dict(again.iter_full("fp32"))
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        again.load_checkpoint(f"{folder}/{stage}")
        for gradients in again._runtime.reducer.buckets:
            gradients.feedback.tensor.zero_()
        _train(again, range(2, 4), rank())
        found = dict(again.iter_full("fp32"))
        assert not all(torch.equal(expected[name], found[name]) for name in expected)

        # Weights alone come without the errors of other weights.
        again.load_checkpoint(f"{folder}/{stage}", load_module_only=True)
        assert not any(bool(one.any()) for one in _errors(again))
        engine.destroy()
        again.destroy()


def load_elsewhere(folder: str, stages: tuple[int, ...]) -> None:
    for stage in stages:
        engine = make(3 if stage == 2 else stage, tower(seed=8))
        _train(engine, range(1), rank())
        with logged() as lines:
            path, _ = engine.load_checkpoint(f"{folder}/{stage}")
        assert path is not None and engine.global_steps == 2
        if torch.distributed.get_world_size() > 1:
            assert not any(bool(one.any()) for one in _errors(engine))
            assert rank() or sum("error feedback" in line for line in lines) == 1
        _train(engine, range(2, 3), rank())
        engine.destroy()


def test_errors_are_saved_for_runs_of_the_same_size(tmp_path: Path) -> None:
    run_ranks(save, 2, str(tmp_path), (0, 2))
    for ranks in (1, 3):
        run_ranks(load_elsewhere, ranks, str(tmp_path), (0, 2))
