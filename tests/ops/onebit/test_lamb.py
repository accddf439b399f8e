"""1-bit LAMB step by step against the publication, in one process with as many workers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed.engine import DeepSpeedEngine
from deepspeed.ops.lamb import FusedLamb
from tests.engine.support import rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import tower
from tests.ops.onebit.test_adam import check_resume, engine_with, losses, train
from tests.zero.onebit import simulated

FREEZE, STEPS, LR, EPS = 3, 7, 0.01, 1e-3


def make(stage: int, seed: int = 3, **settings: Any) -> DeepSpeedEngine:
    params = {"lr": LR, "freeze_step": FREEZE, "eps": EPS, "weight_decay": 0.1}
    section = {"optimizer": {"type": "OneBitLamb", "params": params}}
    return engine_with(tower(seed=seed), stage, settings.pop("client", None), section, **settings)


@pytest.mark.parametrize(("ranks", "stages"), [(1, (0,)), (2, (0, 2)), (3, (0, 1))])
@on_ranks()
def test_equals_the_publication_step_by_step(ranks: int, stages: tuple[int, ...]) -> None:
    for stage in stages:
        for accumulation, clip in ((1, 0.0), (2, 0.05)):
            engine = make(stage, accumulation=accumulation, gradient_clipping=clip)
            simulation = simulated.OneBitLamb(
                tower(), simulated.messages_of(engine, ranks), freeze=FREEZE, lr=LR, decay=0.1, eps=EPS, clip=clip
            )
            for step in range(STEPS):
                train(engine, step, accumulation)
                simulation.step(simulation.gradients(losses(step, accumulation)))
                what = f"stage {stage}, accumulation {accumulation}, step {step}"
                for name, value in engine.iter_full("fp32"):
                    expected = simulation.at[name].detach()
                    torch.testing.assert_close(value, expected, rtol=2e-4, atol=2e-5, msg=lambda m, w=what: f"{w}: {m}")
                assert engine.get_global_grad_norm() == pytest.approx(simulation.norm, rel=1e-3), what
            assert same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")])
            factors = engine.optimizer.optimizer._remembered()
            assert {name: one.last_factor for name, one in factors.items()} == pytest.approx(simulation.last, rel=1e-3)
            assert any(one.last_factor != 1.0 for one in factors.values())
            engine.destroy()


@on_ranks(2)
def test_the_warm_up_is_our_lamb_bit_for_bit() -> None:
    def lamb(model: torch.nn.Module) -> torch.optim.Optimizer:
        return FusedLamb(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1, bias_correction=False)

    engines = [make(0, client=lamb), make(0)]
    for step in range(FREEZE):
        for engine in engines:
            train(engine, step)
        first, second = (dict(engine.iter_full("fp32")) for engine in engines)
        assert all(torch.equal(first[name], second[name]) for name in first)


def resume(folder: str, stages: tuple[int, ...]) -> None:
    for stage in stages:
        for at in (2, 5):
            check_resume(lambda seed, stage=stage: make(stage, seed=seed), at, f"{folder}/{stage}-{at}")


def elsewhere(folder: str) -> None:
    engine = make(1, seed=8)
    engine.load_checkpoint(f"{folder}/0-5")
    train(engine, 5)
    assert engine.global_steps == 6 and rank() < 3
    assert same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")])


def test_a_checkpoint_continues(tmp_path: Path) -> None:
    run_ranks(resume, 2, str(tmp_path), (0, 2))
    run_ranks(elsewhere, 3, str(tmp_path))
