"""1-bit momentum: its bound, groups, norms and parameters that some ranks do not use."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.engine import DeepSpeedEngine
from deepspeed.ops.onebit import ZeroOneAdam
from deepspeed.ops.onebit.phases import largest_update
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.onebit.momentum import BINS, Sketch, sketches
from tests.engine.support import inputs, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import tower
from tests.ops.onebit.test_adam import batch, engine_with
from tests.zero.onebit import simulated

# What travels in units of updates is bounded by what Adam could move, whatever gradients a frozen variance meets.


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


# Param groups of very different learning rates in one message, which has one scale.


NUMEL_GROUPS, FREEZE_GROUPS, STEPS_GROUPS = 400, 24, 64
RATES = {"large": 1e-3, "eighth": 1e-3 / 8, "twentieth": 5e-5, "hundredth": 1e-5, "still": 0.0}


class GivenGroups(nn.Module):
    """Weights whose gradient is what is given; one tensor for each group."""

    def __init__(self) -> None:
        super().__init__()
        for name in RATES:
            self.register_parameter(name, nn.Parameter(torch.zeros(NUMEL_GROUPS)))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return sum(((p * g).sum() for p, g in zip(self.parameters(), gradient, strict=True)), torch.zeros(()))


def engine_of(**params: Any) -> Any:
    def made(model: nn.Module) -> Any:
        named = dict(model.named_parameters())
        return ZeroOneAdam([{"params": [named[name]], "lr": lr} for name, lr in RATES.items()], **params)

    engine = engine_with(GivenGroups(), 0, made, {})
    assert len(engine._runtime.masters) == 1  # of one message
    return engine


def gradients(step: int, signs: torch.Tensor) -> torch.Tensor:
    """Small ones with the given signs, and noise that differs between ranks."""
    dice = torch.Generator().manual_seed(100 * step + rank())
    return 0.4 * signs + 0.8 * torch.randn(len(RATES), NUMEL_GROUPS, generator=dice)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


def at_the_requested_rate() -> None:
    """Each group moves with its own learning rate, and so large is the noise of its codes; one of 0 stays."""
    signs = torch.randn(len(RATES), NUMEL_GROUPS, generator=torch.Generator().manual_seed(1)).sign()
    late = {"var_update_scaler": FREEZE_GROUPS, "bias_correction": True, "betas": (0.9, 0.999)}
    for phase, more in {
        "each exchanged": {"var_freeze_step": 1000},
        "of their own": {"var_freeze_step": FREEZE_GROUPS, "local_step_scaler": 8, "local_step_clipper": 4},
        "as published": {"var_freeze_step": FREEZE_GROUPS, "precondition": False},
    }.items():
        engine = engine_of(**late, **more)
        for step in range(FREEZE_GROUPS):
            engine.backward(engine(gradients(step, signs)))
            engine.step()
        before = weights(engine)
        for step in range(FREEZE_GROUPS, STEPS_GROUPS):
            engine.backward(engine(gradients(step, signs)))
            engine.step()
        after = weights(engine)
        for (name, lr), sign in zip(RATES.items(), signs, strict=True):
            if lr == 0:
                assert torch.equal(after[name], before[name]), (phase, name)
                continue
            steps = (before[name] - after[name]) * sign / lr / (STEPS_GROUPS - FREEZE_GROUPS)
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
    late, signs = 80, torch.zeros(len(RATES), NUMEL_GROUPS)
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


# The norm of a mean gradient that no rank has.


def gradients_mean_norm(numel: int, ranks: int) -> list[torch.Tensor]:
    """A common part with as much noise of each rank's own, sizes of elements as different as in a model."""
    dice = torch.Generator().manual_seed(numel)
    sizes = torch.rand(numel, generator=dice) ** 4
    common = torch.randn(numel, generator=dice)
    return [(common + torch.randn(numel, generator=dice)) * sizes for _ in range(ranks)]


def test_sums_of_random_signs_give_the_norm_of_the_mean() -> None:
    ranks = 8
    for numel in (64, BINS - 64, 300_032):
        own = gradients_mean_norm(numel, ranks)
        norm = torch.stack(own).mean(0).norm().item()
        found = []
        for seed in range(12):
            sums = torch.zeros(BINS)
            for one in own:
                sketch = Sketch(BucketGroup.over(LocalTransport()), seed)
                sketch.add(numel, one, 1.0 / ranks)
                sums += sketch._sums
            found.append(sums.norm().item())
        worst = max(abs(one / norm - 1) for one in found)
        assert worst < (0.1 if numel > BINS else 1e-5)
        # The ranks' own norms would not do.
        assert numel < 1000 or own[0].norm().item() > 1.3 * norm


def test_buckets_of_a_group_are_one_gradient() -> None:
    group = BucketGroup.over(LocalTransport())
    first, second = gradients_mean_norm(640, 1)[0], gradients_mean_norm(128, 1)[0]
    entries = [(group, 640, first, 2.0), (group, 64, None, 1.0), (group, 128, second, 1.0)]
    (sketch,) = sketches(entries, 7)
    expected = (2.0 * first).square().sum() + second.square().sum()
    torch.testing.assert_close(torch.tensor(sketch.squares()), expected, rtol=1e-5, atol=0)


# Models that are awkward for messages of whole buckets: tied, frozen, of odd sizes, used on one rank alone.


WAYS = [
    *((name, stage, {"freeze_step": 2}) for name in ("OneBitAdam", "OneBitLamb") for stage in (0, 1, 2)),
    ("OneBitAdam", 0, {"freeze_step": 2, "precondition": False}),
    ("ZeroOneAdam", 0, {"var_freeze_step": 3}),
    ("ZeroOneAdam", 0, {"var_freeze_step": 3, "precondition": False}),
]


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding = nn.Embedding(7, 9)
        self.head = nn.Linear(9, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen, self.seldom = nn.Linear(9, 9), nn.Linear(9, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, seldom: float | None) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.embedding((x[0] * 100).long() % 5)))
        loss = self.head(hidden).square().mean() + hidden.mean()
        return loss if seldom is None else loss + seldom * self.seldom(hidden).square().mean()


def train(engine: DeepSpeedEngine, *, dense: bool) -> dict[str, torch.Tensor]:
    for step in range(6):
        absent = 0.0 if dense else None
        engine.backward(engine(inputs(step, rank()), 1.0 if rank() == 1 else absent))
        engine.step()
        assert all(value.abs().max() < 10 for _, value in engine.iter_full("fp32"))
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


@on_ranks(2, 3)
def test_what_one_rank_does_not_use_counts_as_zeros() -> None:
    for name, stage, more in WAYS:
        found = []
        section = {"optimizer": {"type": name, "params": {"lr": 0.01, "eps": 1e-3, **more}}}
        for dense in (False, True):
            engine = engine_with(Awkward(), stage, None, section, gradient_clipping=0.1)
            before = {key: value.clone() for key, value in engine.iter_full("fp32")}
            after = train(engine, dense=dense)
            assert same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")]), (name, stage)
            for key, value in after.items():
                moved = not torch.equal(value, before[key])
                assert moved is not key.startswith("frozen"), (name, stage, key)
            found.append(after)
            engine.destroy()
        assert all(torch.equal(value, found[1][key]) for key, value in found[0].items()), (name, stage)
