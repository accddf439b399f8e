"""1-bit Adam step by step against the publication, in one process with as many workers."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.comm.base.counters import traffic
from deepspeed.engine import DeepSpeedEngine
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.onebit import OneBitAdam
from deepspeed.zero.storage import StorageKind
from tests.engine.support import inputs, rank, same_on_all_ranks
from tests.harness import on_ranks, run_ranks
from tests.harness.logged import logged
from tests.harness.toy_models import tower
from tests.zero.onebit import simulated

FREEZE, STEPS, LR, EPS = 2, 6, 0.01, 1e-3


def params(**more: Any) -> dict[str, Any]:
    return {"type": "OneBitAdam", "params": {"lr": LR, "freeze_step": FREEZE, "eps": EPS, **more}}


def make(stage: int, model: nn.Module | None = None, *, more: dict[str, Any] | None = None, **settings: Any) -> Any:
    optimizer = None if "client" not in settings else settings.pop("client")
    if optimizer is None:
        settings["optimizer_section"] = params(**(more or {}))
    config = {"optimizer": settings.pop("optimizer_section")} if "optimizer_section" in settings else {}
    return engine_with(model or tower(), stage, optimizer, config, **settings)


def engine_with(model: nn.Module, stage: int, optimizer: Any, extra: dict[str, Any], **settings: Any) -> Any:
    accumulation = settings.pop("accumulation", 1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        **extra,
        **settings,
    }
    client = optimizer(model) if optimizer else None
    return deepspeed.initialize(model=model, optimizer=client, config=config)[0]


def batch(step: int, micro: int, of_rank: int) -> torch.Tensor:
    return inputs(step, micro, of_rank)


def losses(step: int, accumulation: int) -> Any:
    return lambda model, of_rank: (
        sum(model(batch(step, micro, of_rank)) for micro in range(accumulation)) / accumulation
    )


def train(engine: DeepSpeedEngine, step: int, accumulation: int = 1) -> None:
    for micro in range(accumulation):
        engine.backward(engine(batch(step, micro, rank())))
        engine.step()


def cells(stages: tuple[int, ...]) -> None:
    ranks = torch.distributed.get_world_size()
    for stage in stages:
        # As published, then in the units of updates.
        for accumulation, clip, precondition in ((1, 0.0, False), (2, 0.05, True)):
            more = {"weight_decay": 0.1, "precondition": precondition}
            engine = make(stage, more=more, accumulation=accumulation, gradient_clipping=clip)
            simulation = simulated.OneBitAdam(
                tower(),
                simulated.messages_of(engine, ranks),
                freeze=FREEZE,
                lr=LR,
                decay=0.1,
                eps=EPS,
                clip=clip,
                precondition=precondition,
            )
            for step in range(STEPS):
                train(engine, step, accumulation)
                simulation.step(simulation.gradients(losses(step, accumulation)))
                what = f"stage {stage}, accumulation {accumulation}, step {step}"
                assert engine.get_global_grad_norm() == pytest.approx(simulation.norm, rel=1e-3), what
                for name, value in engine.iter_full("fp32"):
                    expected = simulation.at[name].detach()
                    torch.testing.assert_close(value, expected, rtol=1e-4, atol=2e-5, msg=lambda m, w=what: f"{w}: {m}")
            assert same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")])
            rows = {kind: (counted, formula) for kind, counted, formula, _ in engine.memory_report()}
            counted, formula = rows[StorageKind.PRIVATE.value]
            assert counted == formula and (counted > 0) == (ranks > 1 or stage > 0)
            engine.destroy()


@pytest.mark.parametrize(("ranks", "stages"), [(1, (0,)), (2, (0, 1, 2)), (3, (0, 2))])
def test_equals_the_publication_step_by_step(ranks: int, stages: tuple[int, ...]) -> None:
    run_ranks(cells, ranks, stages)


def warm_up(stages: tuple[int, ...]) -> None:
    for stage in stages:
        for correct in (False, True):

            def adam(model: nn.Module, correct: bool = correct) -> torch.optim.Optimizer:
                return FusedAdam(model.parameters(), lr=LR, eps=EPS, weight_decay=0.1, bias_correction=correct)

            engines = [
                make(stage, client=adam),
                make(stage, more={"weight_decay": 0.1, "bias_correction": correct, "freeze_step": 100}),
            ]
            for step in range(3):
                for engine in engines:
                    train(engine, step)
                first, second = (dict(engine.iter_full("fp32")) for engine in engines)
                assert all(torch.equal(first[name], second[name]) for name in first)
            for engine in engines:
                engine.destroy()


def test_the_warm_up_is_our_adam_bit_for_bit() -> None:
    run_ranks(warm_up, 2, (0, 2))


@on_ranks(2)
def test_the_first_step_is_a_step() -> None:
    engine = make(0)
    before = {name: value.clone() for name, value in engine.iter_full("fp32")}
    train(engine, 0)
    assert all(not torch.equal(before[name], value) for name, value in engine.iter_full("fp32"))


PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}},
}


def skip(engine: DeepSpeedEngine) -> None:
    def kept() -> list[torch.Tensor]:
        buckets = engine.inspect().driver.buckets
        states = [one["exp_avg"] for one in engine.optimizer.optimizer.state.values()]
        whole = [bucket.momentum.tensor for bucket in buckets if bucket.momentum is not None]
        values = [value for _, value in engine.iter_full("fp32")]
        return [one.clone() for one in (*(bucket.private.tensor for bucket in buckets), *states, *whole, *values)]

    before = kept()
    engine.backward(engine(batch(99, 0, rank()) * (math.inf if rank() == 1 else 1.0)))
    engine.step()
    assert engine.optimizer.overflow
    assert all(torch.equal(one, other) for one, other in zip(before, kept(), strict=True))
    train(engine, 100)
    assert not engine.optimizer.overflow
    assert not all(torch.equal(one, other) for one, other in zip(before, kept(), strict=True))


@on_ranks(2)
def test_16_bits_and_an_overflow() -> None:
    """In 16 bits it follows the simulation in fp32 as far as their rounding goes; an overflow changes nothing."""
    for name, section in PRECISIONS.items():
        for stage in (0, 2):
            engine = make(stage, **section)
            messages = simulated.messages_of(engine, 2)
            simulation = simulated.OneBitAdam(tower(), messages, freeze=FREEZE, lr=LR, eps=EPS, precondition=True)
            for step in range(STEPS):
                train(engine, step)
                simulation.step(simulation.gradients(losses(step, 1)))
            first = dict(tower().named_parameters())
            moved = sum((simulation.at[n] - first[n]).square().sum() for n in first).sqrt().item()
            off = sum((v - simulation.at[n]).square().sum() for n, v in engine.iter_full("fp32")).sqrt().item()
            assert off < 0.25 * moved, (name, stage, off, moved)
            assert same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")])
            if name == "fp16":
                skip(engine)
            engine.destroy()


class Sparse(nn.Module):
    """An embedding of which half the rows never occur, a linear layer, and one that one rank does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(10, 9)
        self.last = nn.Linear(9, 3)
        self.seldom = nn.Linear(9, 3)
        self.never = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        rows = x.abs().mul(10).long() % 5
        h = self.embedding(rows).mean(dim=1)
        out = self.last(h).square().mean()
        return out + self.seldom(h).square().mean() if seldom else out


def leave_out(simulation: simulated.OneBitAdam, names: list[str]) -> list[Any]:
    return [(m, [e.clone() for e in m.sent], [e.clone() for e in m.owned]) for m in simulation.messages]


@torch.no_grad()
def put_back(simulation: simulated.OneBitAdam, errors: list[Any], values: dict[str, torch.Tensor]) -> None:
    """Parameters that nobody has a gradient of are as they were: errors, momentum, values."""
    for message, sent, owned in errors:
        position = 0
        for name, numel in zip(message.names, message.numels, strict=True):
            if name in values:
                for one in range(message.ranks):
                    message.sent[one][position : position + numel] = sent[one][position : position + numel]
                    start = message.slice_of(one).start
                    for element in range(position, position + numel):
                        if 0 <= element - start < message.owned[one].numel():
                            message.owned[one][element - start] = owned[one][element - start]
            position += numel
    for name, value in values.items():
        simulation.at[name].copy_(value)
        simulation.m[name].zero_()


LATE: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": FREEZE},
    "OneBitLamb": {"freeze_step": FREEZE},
    "ZeroOneAdam": {"var_freeze_step": FREEZE, "local_step_scaler": 2, "local_step_clipper": 2},
}


def late() -> None:
    """What has its first gradient after the warm-up, a layer or rows of a table, has no variance, and stays."""
    for name, more in LATE.items():
        engine = engine_with(Sparse(), 0, None, {"optimizer": {"type": name, "params": {"lr": LR, "eps": EPS, **more}}})
        first = {key: value.clone() for key, value in engine.iter_full("fp32")}
        for step in range(STEPS):
            engine.backward(engine(batch(step, 0, rank()), step > FREEZE))
            engine.step()
        found = dict(engine.iter_full("fp32"))
        assert torch.equal(found["embedding.weight"][5:], first["embedding.weight"][5:]), name
        for key, value in found.items():
            moved = (value - first[key]).abs().max().item()
            assert moved == 0 if key.startswith(("never", "seldom")) else 0 < moved < 1, (name, key, moved)
        engine.destroy()


def test_a_first_gradient_after_the_warm_up() -> None:
    run_ranks(late, 2)


@on_ranks(2)
def test_masks_and_parameters_without_a_gradient(folder: str) -> None:
    """Masked rows do not move, nor do parameters without a gradient; one used on one rank counts zeros on the other."""
    mask = torch.ones(10, 9)
    mask[5:] = 0

    def client(model: Sparse) -> torch.optim.Optimizer:
        rest = [*model.last.parameters(), *model.seldom.parameters(), *model.never.parameters()]
        groups = [{"params": [model.embedding.weight], "exp_avg_mask": mask}, {"params": rest}]
        return OneBitAdam(groups, lr=LR, freeze_step=FREEZE, eps=EPS, precondition=False)

    for stage in (0, 2):
        model = Sparse()
        engine = make(stage, model, client=client)
        simulation = simulated.OneBitAdam(Sparse(), simulated.messages_of(engine, 2), freeze=FREEZE, lr=LR, eps=EPS)
        never = [name for name in simulation.at if name.startswith("never")]
        simulation.masks = {"embedding.weight": mask}
        for message in simulation.messages:
            assert len(message.names) == 7
        before = {name: value.clone() for name, value in engine.iter_full("fp32")}
        for step in range(STEPS):
            engine.backward(engine(batch(step, 0, rank()), rank() == 0))
            engine.step()
            found = dict(engine.iter_full("fp32"))
            assert torch.equal(found["embedding.weight"][5:], before["embedding.weight"][5:])
            assert all(torch.equal(found[name], before[name]) for name in never)
            by_rank = simulation.gradients(lambda m, r, s=step: m(batch(s, 0, r), r == 0))
            for name in ("seldom.weight", "seldom.bias"):
                by_rank[1][name] = torch.zeros_like(by_rank[0][name])
            if step < FREEZE:
                simulation.step(by_rank)
            else:
                zeros = {name: torch.zeros_like(simulation.at[name]) for name in never}
                kept = {n: simulation.at[n].detach().clone() for n in never}
                errors = leave_out(simulation, never)
                simulation.step([{**one, **zeros} for one in by_rank])
                put_back(simulation, errors, kept)
            for name, value in found.items():
                torch.testing.assert_close(value, simulation.at[name].detach(), rtol=1e-4, atol=2e-5)
        engine.save_checkpoint(f"{folder}/masked-{stage}")
        engine.load_checkpoint(f"{folder}/masked-{stage}")  # the mask is the program's, not the checkpoint's
        assert torch.equal(engine.optimizer.param_groups[0]["exp_avg_mask"], mask)
        engine.destroy()


def check_resume(build: Callable[[int], DeepSpeedEngine], at: int, folder: str) -> None:
    """A second engine, which had other weights, continues from a checkpoint of step ``at`` bit for bit.

    Args:
        build: Makes an engine from a seed.
        at: Number of steps before the checkpoint.
        folder: Where it is saved.
    """
    engine = build(3)
    for step in range(at):
        train(engine, step)
    engine.save_checkpoint(folder)
    again = build(8)
    again.load_checkpoint(folder)
    for step in range(at, at + 3):
        train(engine, step)
        train(again, step)
    expected, found = dict(engine.iter_full("fp32")), dict(again.iter_full("fp32"))
    assert all(torch.equal(expected[name], found[name]) for name in expected), folder
    engine.destroy()
    again.destroy()


def resume(folder: str, stages: tuple[int, ...]) -> None:
    """From both phases."""
    for stage in stages:
        for at in (1, 4):
            check_resume(lambda seed, stage=stage: make(stage, tower(seed=seed)), at, f"{folder}/{stage}-{at}")


def elsewhere(folder: str, stages: tuple[int, ...]) -> None:
    for stage in stages:
        engine = make(2 - stage, tower(seed=8))
        with logged() as lines:
            engine.load_checkpoint(f"{folder}/{stage}-4")
        assert rank() or sum("starts from zero" in line for line in lines) == 1
        train(engine, 5)
        assert same_on_all_ranks([value.tolist() for _, value in engine.iter_full("param")])
        engine.destroy()


def other_unit(folder: str) -> None:
    """Errors of published exchanges are of no use to those in units of updates, and would be giants there."""
    engine = make(0, tower(seed=8), more={"precondition": False})
    with logged() as lines:
        engine.load_checkpoint(f"{folder}/0-4")
    assert rank() or sum("starts from zero" in line for line in lines) == 1
    assert not any(bucket.private.tensor.any() for bucket in engine.inspect().driver.buckets)


def test_a_checkpoint_continues(tmp_path: Path) -> None:
    run_ranks(resume, 2, str(tmp_path), (0, 2))
    run_ranks(other_unit, 2, str(tmp_path))
    run_ranks(elsewhere, 3, str(tmp_path), (0, 2))


@on_ranks(2)
def test_a_run_without_compression_logs_it() -> None:
    for freeze, steps, expected in ((9, 3, True), (2, 4, False)):
        with logged() as lines:
            engine = make(0, more={"freeze_step": freeze})
            for step in range(steps):
                traffic.reset()
                train(engine, step)
            engine.destroy()
        assert any("were warm-up" in line for line in lines) is (expected and rank() == 0)


def refused() -> None:
    for settings, named in (
        ({"zero_optimization": {"stage": 3}}, "stage 3"),
        ({"communication_compression": {"gradients": "int8"}}, "communication_compression"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=named):
            make(0, **settings)
    with pytest.raises(CallOrderError, match="initialize"):
        OneBitAdam([nn.Parameter(torch.zeros(3))]).step()


def test_what_is_refused() -> None:
    run_ranks(refused, 1)


@on_ranks(2)
def test_a_loaded_state_dict_has_the_momentum_of_the_next_step() -> None:
    stages = (0, 1, 2)
    for stage in stages:
        engine = make(stage)
        for step in range(FREEZE + 2):
            train(engine, step)
        saved = copy.deepcopy(engine.optimizer.state_dict())
        buckets = engine.inspect().driver.buckets
        errors = [bucket.private.tensor.clone() for bucket in buckets]
        found = []
        for is_second in (False, True):
            if is_second:
                engine.optimizer.load_state_dict(saved)
                for bucket, error in zip(buckets, errors, strict=True):
                    bucket.private.tensor.copy_(error)
            train(engine, FREEZE + 2)
            found.append([value.detach().clone() for value in engine.module.parameters()])
            train(engine, FREEZE + 3)
        for first, second in zip(*found, strict=True):
            assert torch.equal(first, second), stage
        engine.destroy()
