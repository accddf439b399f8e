"""Param groups of very different learning rates in one message, which has one scale."""

import math
from typing import Any

import torch
from torch import nn

from deepspeed.ops.onebit import ZeroOneAdam
from tests.engine.support import rank
from tests.harness import on_ranks, run_ranks
from tests.onebit.test_adam import engine_with

NUMEL, FREEZE, STEPS = 400, 24, 64
RATES = {"large": 1e-3, "eighth": 1e-3 / 8, "twentieth": 5e-5, "hundredth": 1e-5, "still": 0.0}


class Given(nn.Module):
    """Weights whose gradient is what is given; one tensor for each group."""

    def __init__(self) -> None:
        super().__init__()
        for name in RATES:
            self.register_parameter(name, nn.Parameter(torch.zeros(NUMEL)))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return sum(((p * g).sum() for p, g in zip(self.parameters(), gradient, strict=True)), torch.zeros(()))


def engine_of(**params: Any) -> Any:
    def made(model: nn.Module) -> Any:
        named = dict(model.named_parameters())
        return ZeroOneAdam([{"params": [named[name]], "lr": lr} for name, lr in RATES.items()], **params)

    engine = engine_with(Given(), 0, made, {})
    assert len(engine._runtime.masters) == 1  # of one message
    return engine


def gradients(step: int, signs: torch.Tensor) -> torch.Tensor:
    """Small ones with the given signs, and noise that differs between ranks."""
    dice = torch.Generator().manual_seed(100 * step + rank())
    return 0.4 * signs + 0.8 * torch.randn(len(RATES), NUMEL, generator=dice)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


def at_the_requested_rate() -> None:
    """Each group moves with its own learning rate, and so large is the noise of its codes; one of 0 stays."""
    signs = torch.randn(len(RATES), NUMEL, generator=torch.Generator().manual_seed(1)).sign()
    late = {"var_update_scaler": FREEZE, "bias_correction": True, "betas": (0.9, 0.999)}
    for phase, more in {
        "each exchanged": {"var_freeze_step": 1000},
        "of their own": {"var_freeze_step": FREEZE, "local_step_scaler": 8, "local_step_clipper": 4},
        "as published": {"var_freeze_step": FREEZE, "precondition": False},
    }.items():
        engine = engine_of(**late, **more)
        for step in range(FREEZE):
            engine.backward(engine(gradients(step, signs)))
            engine.step()
        before = weights(engine)
        for step in range(FREEZE, STEPS):
            engine.backward(engine(gradients(step, signs)))
            engine.step()
        after = weights(engine)
        for (name, lr), sign in zip(RATES.items(), signs, strict=True):
            if lr == 0:
                assert torch.equal(after[name], before[name]), (phase, name)
                continue
            steps = (before[name] - after[name]) * sign / lr / (STEPS - FREEZE)
            # Gradients, and roots of the variance of their mean.
            expected = 0.4 / math.sqrt(0.4**2 + 0.8**2 / torch.distributed.get_world_size())
            assert 0.8 < steps.mean().item() / expected < 1.2, (phase, name, steps.mean().item())
            assert steps.std().item() < 0.4, (phase, name, steps.std().item())
        for group in engine.optimizer.param_groups:
            for run in group["params"]:
                state = engine.optimizer.state[run]
                found = (state["exp_avg"].abs() / (state["exp_avg_sq"].sqrt() + 1e-12)).max().item()
                assert found < 100, (phase, group["lr"], found)
        engine.destroy()


def test_each_group_moves_with_its_own_learning_rate() -> None:
    run_ranks(at_the_requested_rate, 2)
    run_ranks(at_the_requested_rate, 1)


@on_ranks(2)
def test_steps_fall_with_the_learning_rate() -> None:
    """A learning rate falls to a tenth and to a hundredth at once; so do the steps, whatever is still owed."""
    late, signs = 80, torch.zeros(len(RATES), NUMEL)
    for freeze, factor in ((1000, 0.1), (late, 0.01)):
        engine = engine_of(betas=(0.5, 0.99), var_update_scaler=late, bias_correction=True, var_freeze_step=freeze)
        for step in range(late + 16):
            if step == late + 8:
                for group in engine.optimizer.param_groups:
                    group["lr"] *= factor
            before = weights(engine) if step >= late else {}
            engine.backward(engine(gradients(step, signs)))
            engine.step()
            after = weights(engine) if step >= late else {}
            for name in after:
                if RATES[name]:
                    rate = RATES[name] * (factor if step >= late + 8 else 1.0)
                    moved = (after[name] - before[name]).square().mean().sqrt().item() / rate
                    assert 0.1 < moved < 1.5, (freeze, factor, step, name, moved)
        engine.destroy()
