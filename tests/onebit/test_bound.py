"""What travels in units of updates is bounded by what Adam could move, whatever gradients a frozen variance meets."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.ops.onebit.phases import largest_update
from tests.engine.support import rank
from tests.harness import on_ranks
from tests.harness.toy_models import tower
from tests.onebit import simulated
from tests.onebit.test_adam import batch, engine_with

BETAS = (0.9, 0.999)
LR, EPS, FREEZE, STEPS = 0.002, 1e-3, 3, 10
LATE: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": FREEZE},
    "ZeroOneAdam": {
        **{"var_freeze_step": FREEZE, "var_update_scaler": FREEZE, "bias_correction": True},
        **{"local_step_scaler": 3, "local_step_clipper": 2},
    },
}


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.99), (0.0, 0.9), (0.5, 0.3)])
def test_no_gradients_take_adam_further(betas: tuple[float, float]) -> None:
    bound = largest_update(betas)
    assert bound == pytest.approx(simulated.most_of_adam(*betas), rel=1e-6)
    dice = torch.Generator().manual_seed(1)
    for power in (1, 3, 9):
        momentum = variance = torch.zeros(500, dtype=torch.float64)
        for _ in range(200):
            gradient = torch.randn(500, dtype=torch.float64, generator=dice) ** power
            momentum = betas[0] * momentum + (1 - betas[0]) * gradient
            variance = betas[1] * variance + (1 - betas[1]) * gradient**2
            assert (momentum.abs() <= bound * variance.sqrt() * (1 + 1e-9)).all()


def test_a_momentum_that_remembers_longer_than_the_variance_has_no_bound() -> None:
    assert largest_update((0.9, 0.8)) == math.inf
    assert largest_update((0.9, 0.8), 0.0) == math.inf


@on_ranks(1, 2)
def test_no_bound_and_a_learning_rate_of_zero() -> None:
    """Steps of a learning rate of 0 move nothing, and those after them move on."""
    params = {"lr": LR, "eps": EPS, "betas": [0.9, 0.8], **LATE["ZeroOneAdam"]}
    engine = engine_with(tower(), 0, None, {"optimizer": {"type": "ZeroOneAdam", "params": params}})
    seen = []
    for step in range(STEPS):
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0 if FREEZE <= step < FREEZE + 5 else LR
        engine.backward(engine(batch(step, 0, rank())))
        engine.step()
        seen.append({name: value.clone() for name, value in engine.iter_full("fp32")})
    for name, value in seen[-1].items():
        assert value.isfinite().all() and not torch.equal(value, seen[FREEZE + 4][name]), name
        assert torch.equal(seen[FREEZE - 1][name], seen[FREEZE + 4][name]), name
    engine.destroy()


NUMEL = 4000


class Given(nn.Module):
    """Weights whose gradient is what is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.w * gradient).sum()


@on_ranks(1, 2)
def test_a_gradient_larger_than_the_frozen_variance() -> None:
    """Eight elements get, once and on one rank, 10,000 times the gradient that their frozen variance knows."""
    for name, more in LATE.items():
        section = {"type": name, "params": {"lr": LR, "eps": 1e-12, "betas": list(BETAS), **more}}
        engine = engine_with(Given(), 0, None, {"optimizer": section})
        dice = torch.Generator().manual_seed(rank())
        before, farthest, farthest_rare = torch.zeros(NUMEL), 0.0, 0.0
        for step in range(STEPS):
            gradient = torch.randn(NUMEL, generator=dice)
            gradient[:8] *= 1 if step == FREEZE + 4 and rank() == 0 else 1e-4
            engine.backward(engine(gradient))
            engine.step()
            after = dict(engine.iter_full("fp32"))["w"].clone()
            moved = (after - before).abs()
            before = after
            if step >= FREEZE:
                farthest = max(farthest, moved[8:].max().item())
                farthest_rare = max(farthest_rare, moved[:8].max().item())
        # As variances of three updates without correction are too small by sqrt(0.003), updates are of size 3 or so.
        # As ranks come together they take back a step of their own too.
        most = 2 * LR * simulated.most_of_adam(*BETAS)
        assert 0 < farthest_rare < most and 0 < farthest < most, (name, farthest_rare / LR, farthest / LR)
        engine.destroy()


@on_ranks(1, 2, 3)
def test_equals_the_definition_where_the_bound_holds(ranks: int) -> None:
    """Gradients of everything grow after the freeze: step by step as by definition, where the bound holds them."""
    ranks = torch.distributed.get_world_size()
    for name, more in LATE.items():
        section = {"type": name, "params": {"lr": LR, "eps": EPS, **more}}
        engine = engine_with(tower(), 0, None, {"optimizer": section})
        messages = simulated.messages_of(engine, ranks)
        reference: Any
        if name == "OneBitAdam":
            reference = simulated.OneBitAdam(tower(), messages, freeze=FREEZE, lr=LR, eps=EPS, precondition=True)
        else:
            how: dict[str, Any] = {"freeze": FREEZE, "kappa": FREEZE, "double_after": 3, "most": 2, "clip": 0.0}
            how |= {"lr": LR, "eps": EPS, "decay": 0.0, "precondition": True, "correct": True}
            reference = simulated.ZeroOneAdam(tower(), messages, **how)
        bounded = 0
        for step in range(STEPS):
            loud = 30.0 if step > FREEZE else 1.0

            def loss(model: Any, of_rank: int, step: int = step, loud: float = loud) -> torch.Tensor:
                return model(batch(step, 0, of_rank)) * loud

            engine.backward(loss(engine, rank()))
            engine.step()
            reference.step(reference.gradients(loss))
            mine = reference.at if name == "OneBitAdam" else reference.at[rank()]
            for key, value in engine.iter_full("fp32"):
                what = f"{name}, {ranks} ranks, step {step}"
                torch.testing.assert_close(
                    value, mine[key].detach(), rtol=2e-4, atol=2e-5, msg=lambda m, w=what: f"{w}: {m}"
                )
            bounded += sum(message.cut for message in messages)
        assert bounded > 100
        engine.destroy()
