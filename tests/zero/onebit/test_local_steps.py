"""0/1 Adam, which exchanges parameters at intervals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.comm.base.counters import traffic
from deepspeed.engine import DeepSpeedEngine
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.onebit.zero_one import LR_EXCHANGED, LR_OWED, LR_SUM, updates_of_variance
from tests.engine.support import WIDTH, inputs, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import tower
from tests.ops.onebit.test_adam import engine_with, losses, train
from tests.zero.onebit import simulated
from tests.zero.onebit.test_momentum import NUMEL, Given, weights

# 0/1 Adam step by step against the publication, in one process with as many workers.


STEPS, LR, EPS = 12, 0.003, 3e-3
SCHEDULE = {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 3}


def make(stage: int = 0, seed: int = 3, *, published: bool = False, **settings: Any) -> DeepSpeedEngine:
    ours = {"precondition": not published, "bias_correction": not published}
    params = {"lr": LR, "eps": EPS, "weight_decay": 0.1, **ours, **SCHEDULE}
    section = {"optimizer": {"type": "ZeroOneAdam", "params": params}}
    return engine_with(tower(seed=seed), stage, None, section, **settings)


def test_the_keys_in_checkpoints_keep_their_spelling() -> None:
    assert (LR_EXCHANGED, LR_SUM, LR_OWED) == ("lr_travelled", "lr_since_exchange", "lr_owed")


@on_ranks(1, 2, 3)
def test_equals_the_publication_step_by_step(ranks: int) -> None:
    for accumulation, clip, published in ((1, 0.0, True), (2, 0.05, False)):
        engine = make(accumulation=accumulation, gradient_clipping=clip, published=published)
        simulation = simulated.ZeroOneAdam(
            tower(),
            simulated.messages_of(engine, ranks),
            freeze=4,
            kappa=1,
            double_after=2,
            most=3,
            lr=LR,
            decay=0.1,
            eps=EPS,
            clip=clip,
            precondition=not published,
            correct=not published,
        )
        assert simulation.variance == [1, 2, 4] == sorted(updates_of_variance(4, 1))
        for step in range(STEPS):
            traffic.reset()
            train(engine, step, accumulation)
            simulation.step(simulation.gradients(losses(step, accumulation)))
            what = f"{ranks} ranks, accumulation {accumulation}, step {step}"
            is_coded, takes_mean = step + 1 in simulation.exchanges, step + 1 in simulation.variance
            together = is_coded or takes_mean
            assert ranks == 1 or (traffic.requested["swap"].calls > 0) == is_coded, what
            assert ranks == 1 or (traffic.requested["all_reduce"].calls > 0) == takes_mean, what
            for name, value in engine.iter_full("fp32"):
                expected = simulation.at[rank()][name].detach()
                torch.testing.assert_close(value, expected, rtol=2e-4, atol=2e-5, msg=lambda m, w=what: f"{w}: {m}")
            values = [value.tolist() for _, value in engine.iter_full("param")]
            assert same_on_all_ranks(values) == (together or ranks == 1), what
        assert simulation.exchanges == [3, 5, 6, 8, 10]  # in one bit; the mean gradient in 1, 2 and 4
        engine.destroy()


@on_ranks(1, 2)
def test_the_first_steps_are_those_of_adamw() -> None:
    """As long as each step updates the variance, steps are AdamW's bit for bit."""
    for precondition in (True, False):
        for correct in (True, False):
            params = {"lr": LR, "eps": 1e-8, "weight_decay": 0.1, "bias_correction": correct}
            settings = {"accumulation": 2}
            of_zero_one = {"type": "ZeroOneAdam", "params": {**params, "precondition": precondition}}
            ours = engine_with(tower(seed=3), 0, None, {"optimizer": of_zero_one}, **settings)
            adamw = engine_with(tower(seed=3), 0, None, {"optimizer": {"type": "AdamW", "params": params}}, **settings)
            for step in range(3):
                traffic.reset()
                train(ours, step, 2)
                assert torch.distributed.get_world_size() == 1 or traffic.requested["swap"].calls == 0
                train(adamw, step, 2)
                for (name, one), (_, other) in zip(ours.iter_full("fp32"), adamw.iter_full("fp32"), strict=True):
                    assert torch.equal(one, other), (precondition, correct, step, name)
            ours.destroy()
            adamw.destroy()


@on_ranks(2)
def test_in_16_bits_ranks_come_together() -> None:
    engine = make(bf16={"enabled": True})
    for step in range(8):
        train(engine, step)
    assert same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")])
    train(engine, 8)
    assert not same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")])


def resume(folder: str) -> None:
    """A save brings ranks together, so that what it has is the weights of all."""
    for at, settings in ((3, {}), (7, {}), (7, {"bf16": {"enabled": True}}), (10, {})):
        engine = make(**settings)
        for step in range(at):
            train(engine, step)
        engine.save_checkpoint(f"{folder}/{at}")
        assert same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")])
        again = make(seed=8, **settings)
        again.load_checkpoint(f"{folder}/{at}")
        for step in range(at, STEPS + 1):
            train(engine, step)
            train(again, step)
            expected, found = dict(engine.iter_full("fp32")), dict(again.iter_full("fp32"))
            assert all(torch.equal(expected[name], found[name]) for name in expected), (at, step)
        engine.destroy()
        again.destroy()


def elsewhere(folder: str) -> None:
    engine = make(seed=8)
    engine.load_checkpoint(f"{folder}/10")
    for step in range(10, 13):
        train(engine, step)
    assert engine.global_steps == 13
    assert same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")])


def test_a_checkpoint_continues(tmp_path: Path) -> None:
    run_ranks(resume, 2, str(tmp_path))
    run_ranks(elsewhere, 3, str(tmp_path))


class Seldom(nn.Module):
    """A layer that is used until ranks take steps of their own and then in a single step, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.always, self.seldom, self.never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        x = torch.tanh(self.always(x))
        return (self.seldom(x) if seldom else x).square().mean()


def seldom(folder: str) -> None:
    """What was moved between two exchanges travels in the next one, also where it has no gradient then."""
    section = {"optimizer": {"type": "ZeroOneAdam", "params": {"lr": LR, "eps": EPS, **SCHEDULE}}}
    for saves in (False, True):
        engine = engine_with(Seldom(), 0, None, section)
        first = {name: value.clone() for name, value in engine.iter_full("fp32")}
        for step in range(8):  # ranks come together after updates 1 to 6 and 8
            engine.backward(engine(inputs(step, rank()), step in (0, 1, 2, 6)))
            engine.step()
            if step == 6:
                moved = dict(engine.iter_full("fp32"))["seldom.weight"].tolist()
                assert not same_on_all_ranks(moved)
                if saves:
                    engine.save_checkpoint(f"{folder}/seldom")
                    assert same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")])
        found = dict(engine.iter_full("fp32"))
        assert same_on_all_ranks([value.tolist() for value in found.values()])
        assert all(torch.equal(found[name], first[name]) for name in first if name.startswith("never"))
        apart = (found["seldom.weight"] - first["seldom.weight"]).abs().max().item()
        assert 0 < apart < 20 * LR
        engine.destroy()


def test_what_is_used_seldom_comes_together_too(tmp_path: Path) -> None:
    run_ranks(seldom, 2, str(tmp_path))


@on_ranks(1)
def test_stages_that_cut_masters_are_refused() -> None:
    with pytest.raises(DeepSpeedConfigError, match="OneBitAdam"):
        make(stage=1)


# 0/1 Adam: ranks that are brought together between two exchanges, for a save, lose nothing by it.


FREEZE, GAP, INTERVALS, LR_SYNCHRONIZE = 20, 16, 3, 1e-3
LATE = {"lr": LR_SYNCHRONIZE, "var_freeze_step": FREEZE, "var_update_scaler": FREEZE, "bias_correction": True}
LATE |= {"local_step_scaler": 1, "local_step_clipper": GAP}


def errors(engine: Any) -> torch.Tensor:
    return torch.cat([bucket.private.tensor for bucket in engine.inspect().driver.buckets])


def mean(values: dict[str, torch.Tensor]) -> torch.Tensor:
    flat = torch.cat([value.flatten() for value in values.values()])
    torch.distributed.all_reduce(flat)
    return flat / torch.distributed.get_world_size()


@on_ranks(2)
def test_a_save_between_exchanges_loses_nothing(folder: str) -> None:
    """Saves after 1, 8 and 15 of 16 steps."""
    found = []
    for saves in ((), (1, 8, 15)):
        params = {"betas": [0.9, 0.999], **LATE}
        engine = engine_with(Given(), 0, None, {"optimizer": {"type": "ZeroOneAdam", "params": params}})
        for step in range(FREEZE + INTERVALS * GAP):
            dice = torch.Generator().manual_seed(100 * step + rank())
            gradient = 0.4 + 0.8 * torch.randn(5, NUMEL, generator=dice)
            engine.backward(engine(gradient))
            engine.step()
            if step >= FREEZE and (step + 1 - FREEZE) % GAP in saves:
                owed, stood = errors(engine).clone(), weights(engine)
                engine.save_checkpoint(f"{folder}/{len(saves)}")
                assert torch.equal(errors(engine), owed) and owed.abs().max() > 0, step
                assert same_on_all_ranks([value.tolist() for value in weights(engine).values()])
                torch.testing.assert_close(mean(weights(engine)), mean(stood), rtol=1e-6, atol=1e-8)
        found.append(mean(weights(engine)))
        engine.destroy()
    plain, saved = found
    assert plain.mean() < -0.4 * LR_SYNCHRONIZE * INTERVALS * GAP
    # Which bits are sent differs, so weights are apart by what is owed.
    assert (saved - plain).norm() < 0.15 * plain.norm()
    assert 0.97 < saved.mean() / plain.mean() < 1.03


@on_ranks(2)
def test_weights_loaded_alone_count(folder: str) -> None:
    """Weights that are loaded without states are where the next step begins, in an interval and between two."""
    for at in (7, 8):
        engine = make()
        for step in range(at):
            train(engine, step)
        engine.save_checkpoint(f"{folder}/{at}")
        saved = weights(engine)
        for step in range(at, STEPS + 1):
            train(engine, step)
        engine.load_checkpoint(f"{folder}/{at}", load_optimizer_states=False)
        assert all(torch.equal(value, saved[name]) for name, value in weights(engine).items())
        train(engine, STEPS + 1)
        for name, value in weights(engine).items():
            moved = (value - saved[name]).abs().max().item()
            assert 0 < moved < 0.01, (at, name, moved)
        engine.destroy()
