"""Islands that train by themselves between outer steps: equal to the published outer step, on every rank."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.engine import DeepSpeedEngine
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.moe.layer import MoE
from deepspeed.zero.storage import StorageKind
from tests.engine.support import engine_of, inputs, rank, same_on_all_ranks
from tests.harness import on_ranks
from tests.harness.toy_models import tower

SIZE, EVERY, LR, MOMENTUM = 2, 2, 0.7, 0.9
FAR = {"fp32": 1e-6, "bf16": 4e-3, "int8": 8e-3, "int4": 0.15}  # of the norm of what was moved


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def make(stage: int, wire: str = "fp32", seed: int = 3, **settings: Any) -> DeepSpeedEngine:
    islands = {"size": SIZE, "sync_every": EVERY, "outer_lr": LR, "outer_momentum": MOMENTUM, "wire": wire}
    section = {"islands": islands, **settings.pop("section", {})}
    return engine_of(tower(seed=seed), stage, optimizer=sgd, communication_compression=section, **settings)


def run_step(engine: DeepSpeedEngine, step: int) -> None:
    engine.backward(engine(inputs(step, rank())))
    engine.step()


def weights(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


class Reference:
    """All islands in one process."""

    def __init__(self, islands: int) -> None:
        self.anchor = tower()
        self.outer = torch.optim.SGD(self.anchor.parameters(), lr=LR, momentum=MOMENTUM, nesterov=True)
        self.models = [copy.deepcopy(self.anchor) for _ in range(islands)]

    def step(self, step: int) -> None:
        for number, model in enumerate(self.models):
            optimizer = sgd(model)
            sum(model(inputs(step, number * SIZE + place)) / SIZE for place in range(SIZE)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            for parameter, *others in zip(*(m.parameters() for m in (self.anchor, *self.models)), strict=True):
                parameter.grad = parameter.detach() - sum(other.detach() for other in others) / len(others)
            self.outer.step()
            for model in self.models:
                model.load_state_dict(self.anchor.state_dict())


@on_ranks(4)
def test_equals_the_outer_step_by_hand() -> None:
    stages = (0, 2, 3)
    for stage in stages:
        for wire, far in FAR.items():
            reference, engine = Reference(2), make(stage, wire, seed=3 + rank())  # all get the first rank's values
            first = torch.cat([value.view(-1) for value in weights(engine).values()])
            for step in range(2 * EVERY):
                run_step(engine, step)
                reference.step(step)
                found = weights(engine)
                mine = reference.models[rank() // SIZE]
                expected = torch.cat([value.detach().view(-1) for value in mine.parameters()])
                apart = (torch.cat([found[n].view(-1) for n, _ in mine.named_parameters()]) - expected).norm()
                assert apart <= (2 * far + 1e-5) * (expected - first).norm(), f"stage {stage}, {wire}, step {step}"
                total = sum(value.double().sum().item() for value in found.values())
                assert same_on_all_ranks(total) is ((step + 1) % EVERY == 0), f"stage {stage}, {wire}, step {step}"
            rows = {kind: (counted, formula) for kind, counted, formula, _ in engine.memory_report()}
            counted, formula = rows[StorageKind.PRIVATE.value]
            assert counted == formula == sum(8 * master.flat.numel() for master in engine._runtime.masters)
            engine.destroy()


@on_ranks(2)
def test_islands_of_one_rank() -> None:
    """Each rank is an island."""
    for stage in (0, 2, 3):
        engine = make(stage, section={"islands": {"size": 1, "sync_every": 2}})
        for step in range(4):
            run_step(engine, step)
            total = sum(value.double().sum().item() for value in weights(engine).values())
            assert same_on_all_ranks(total) is (step % 2 == 1)
        engine.destroy()


@on_ranks(4)
def test_checkpoints_are_of_a_meeting(folder: str) -> None:
    stages = (0, 3)
    for stage in stages:
        engine = make(stage, section={"gradients": "int4"})
        for step in range(EVERY + 1):
            run_step(engine, step)
        engine.save_checkpoint(f"{folder}/{stage}")  # the islands meet for it
        saved = weights(engine)
        assert same_on_all_ranks(sum(value.double().sum().item() for value in saved.values()))
        again = make(stage, seed=9, section={"gradients": "int4"})
        again.load_checkpoint(f"{folder}/{stage}")
        assert all(torch.equal(value, saved[name]) for name, value in weights(again).items())
        assert again.global_steps == EVERY + 1
        momenta = [
            (state.momentum.tensor, other.momentum.tensor)
            for state, other in zip(engine.inspect().driver.states, again.inspect().driver.states, strict=True)
        ]
        assert all(torch.equal(one, other) and bool(one.any()) for one, other in momenta)
        engine.destroy()
        again.destroy()
        plain = engine_of(tower(seed=9), stage, optimizer=sgd)  # and any other run reads the weights
        plain.load_checkpoint(f"{folder}/{stage}")
        assert all(torch.equal(value, saved[name]) for name, value in weights(plain).items())
        plain.destroy()


@pytest.mark.slow
@on_ranks(8)
def test_neighbors_on_islands() -> None:
    """Islands of four ranks, two of which share parameters, beside islands whose four ranks do."""
    found = []
    for zero in ({}, {"zero_hpz_partition_size": 2}, {"mics_shard_size": 2}):
        islands = {"size": 4, "sync_every": 2}
        sharded = {"stage3_param_persistence_threshold": 0, **zero}
        engine = engine_of(tower(), 3, optimizer=sgd, zero=sharded, communication_compression={"islands": islands})
        for step in range(3):
            run_step(engine, step)
        found.append(torch.cat([value.view(-1) for value in weights(engine).values()]))
        assert not same_on_all_ranks(found[-1].double().sum().item())  # the last update was alone
        engine.destroy()
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_what_does_not_fit_is_refused_by_name() -> None:
    for key, match in (({"size": 3}, "does not divide"), ({"size": 2}, "not a multiple of")):
        zero = {"zero_hpz_partition_size": 4} if "multiple" in match else {}
        with pytest.raises(DeepSpeedConfigError, match=match):
            engine_of(tower(), 3, zero=zero, communication_compression={"islands": key})
    replicated = nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=1))
    engine_of(replicated, 0, communication_compression={"islands": {"size": 2}}).destroy()
    for size in (1, 2):  # experts of one rank would have got the values of those of another
        model = nn.Sequential(MoE(4, nn.Linear(4, 4), num_experts=2, ep_size=2))
        with pytest.raises(DeepSpeedConfigError, match="islands with experts that are spread over ranks"):
            engine_of(model, 0, communication_compression={"islands": {"size": size}})
