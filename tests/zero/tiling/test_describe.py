"""Parameters that a group of their own shares: four ranks, of which 0 and 2 hold one expert, 1 and 3 another.

Everything else is shared by all four. Compared with one process that has both experts.
"""

import copy
import math

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.comm.job.job import define_group
from deepspeed.errors import CallOrderError, CheckpointError, DeepSpeedConfigError, NotYetSupportedError
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.zero.tiling.describe import describe, in_group, put_in_group
from tests.engine.support import SHARDED, WIDTH, adamw, engine_of, inputs, rank, same_on_all_ranks
from tests.harness import on_ranks

EXPERTS = [[0, 2], [1, 3]]


class Model(nn.Module):
    """Two layers with an expert in between, which is of this rank alone to its group."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        with in_group("experts"):
            self.expert = nn.Linear(WIDTH, WIDTH)
        put_in_group(self.expert.parameters(), "experts")

    def forward(self, x: torch.Tensor, uses_expert: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x.to(self.first.bias.dtype)))
        if uses_expert:
            x = x + self.expert(x)
        return self.last(x).float().square().mean()


def _reference() -> list[Model]:
    """What the ranks of either expert have: the first rank's values of everything, each group's first of the expert."""
    models = [Model(seed) for seed in (0, 1)]
    models[1].first, models[1].last = models[0].first, models[0].last
    return models


def _uses_expert(step: int, of_rank: int) -> bool:
    """In step 1 rank 0 does not, in step 2 nobody who holds the first expert does."""
    return not (step == 1 and of_rank == 0) and not (step == 2 and of_rank in EXPERTS[0])


def _compare(stage: int, accumulation: int, clip: float, offload: bool, norms: list[float]) -> None:
    reference = _reference()
    experts = nn.ModuleList([reference[0].first, reference[0].last, *(model.expert for model in reference)])
    optimizer = adamw(experts)
    zero = dict(SHARDED) if stage == 3 else {}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    engine = engine_of(Model(rank()), stage, zero=zero, accumulation=accumulation, gradient_clipping=clip)
    for step in range(4):
        for micro in range(accumulation):
            engine.backward(engine(inputs(step, micro, rank()), _uses_expert(step, rank())))
            engine.step()
        optimizer.zero_grad()
        for micro in range(accumulation):
            for other in range(4):
                loss = reference[other % 2](inputs(step, micro, other), _uses_expert(step, other))
                (loss / (4 * accumulation)).backward()
        norm = torch.nn.utils.clip_grad_norm_(experts.parameters(), clip or math.inf)
        optimizer.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
        norms.append(engine.get_global_grad_norm())
        found = dict(engine.iter_full("fp32"))
        assert len(found) == 6
        for name, value in reference[rank() % 2].named_parameters():
            torch.testing.assert_close(found[name], value.detach(), msg=lambda text: f"{name}, step {step}: {text}")  # noqa: B023
    assert torch.equal(safe_get_full_fp32_param(engine.module.expert.weight), found["expert.weight"])
    for name, counted, formula, _ in engine.memory_report():
        assert counted == formula, f"{name}: {counted} counted, {formula} by formula"
    engine.destroy()


CELLS = [(0, 1, 0.2, False), (1, 2, 0.0, False), (2, 2, 0.2, True), (3, 2, 0.2, False), (3, 1, 0.0, True)]


@on_ranks(4, timeout=150)
def test_equals_one_process_with_both_experts() -> None:
    """At every stage, offloaded too; clipped; with an expert that only some or none of its ranks use."""
    cells = CELLS
    define_group("experts", EXPERTS)
    for cell in cells:
        norms: list[float] = []
        try:
            _compare(*cell, norms)
        except AssertionError as error:
            raise AssertionError(f"stage {cell[0]}, {cell[1:]}: {error}") from None
        assert same_on_all_ranks(norms)


class Boosted(Model):
    """Its expert's gradient may be infinite where that of nothing else is."""

    def forward(self, x: torch.Tensor, boost: float = 0.0) -> torch.Tensor:
        return super().forward(x) + boost * self.expert.weight.float().sum()


@on_ranks(4)
def test_an_overflow_in_one_group_skips_the_step_of_all() -> None:
    stages = (0, 3)
    define_group("experts", EXPERTS)
    for stage in stages:
        engine = engine_of(Boosted(rank()), stage, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
        before = dict(engine.iter_full("fp32"))
        for boost in (float("inf"), 0.0):
            engine.backward(engine(inputs(0, rank()), boost if rank() == 3 else 0.0))
            engine.step()
            changed = [name for name, value in engine.iter_full("fp32") if not torch.equal(value, before[name])]
            assert len(changed) == (0 if boost else 6)
            assert engine.optimizer.overflow == bool(boost)
        assert same_on_all_ranks([engine.optimizer.loss_scale, engine.get_global_grad_norm()])
        assert engine.optimizer.loss_scale == 128


@on_ranks(4)
def test_zero_init_gives_each_group_its_own_first_values() -> None:
    define_group("experts", EXPERTS)
    expected = _reference()[rank() % 2]
    with deepspeed.zero.Init():
        model = Model(rank())
    assert model.expert.weight.ds_zero_partition_world_size == 2
    assert model.first.weight.ds_zero_partition_world_size == 4
    alike = copy.deepcopy(model)
    engine = engine_of(model, 3)
    for source in (engine.module, alike):
        with deepspeed.zero.GatheredParameters(source.parameters()):
            for (name, value), (_, found) in zip(
                expected.named_parameters(), source.named_parameters(), strict=True
            ):  # fmt: skip
                assert torch.equal(value, found), name
    with deepspeed.zero.GatheredParameters(engine.module.parameters(), modifier_rank=2):
        for parameter in engine.module.parameters():
            parameter.data.fill_(rank())
    found = dict(engine.iter_full("fp32"))
    assert found["first.weight"].unique().tolist() == [2.0]
    assert found["expert.weight"].unique().tolist() == [float(EXPERTS[rank() % 2][1])]
    with deepspeed.zero.Init():
        plain = nn.Linear(WIDTH, WIDTH)
    put_in_group(plain.parameters(), "experts")
    with pytest.raises(DeepSpeedConfigError, match=r"zero.Init has sharded it over 'data'.*in_group\('experts'\)"):
        engine_of(plain, 3)


LAMB = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 2},
}


@on_ranks(2)
def test_unsupported_settings_are_refused_by_name() -> None:
    with pytest.raises(DeepSpeedConfigError, match="'experts', which is not defined"):
        engine_of(Model(0), 2)
    with pytest.raises(DeepSpeedConfigError, match=r"the ranks \[0, 0\]; expected every rank from 0 to 1 once"):
        define_group("experts", [[0], [0]])
    define_group("experts", [[0], [1]])
    with pytest.raises(DeepSpeedConfigError, match="the name is taken"):
        define_group("experts", [[0, 1]])
    with pytest.raises(NotYetSupportedError, match="Lamb .* 'expert.weight' in the group 'experts'"):
        deepspeed.initialize(model=Model(0), config=LAMB)
    marked = nn.Linear(WIDTH, WIDTH)
    marked.weight.allreduce = False
    with pytest.raises(DeepSpeedConfigError, match="'weight' has allreduce = False and no group_name"):
        engine_of(marked, 2)
    marked.weight.group_name = "ep_size_1"  # every rank has all experts
    assert describe("weight", marked.weight).group == "data"
    marked.weight.group_name = "experts"
    engine = engine_of(marked, 2)
    assert [bucket.layout.group for bucket in engine._runtime.buckets] == ["experts", "data"]
    with pytest.raises(CheckpointError, match="'weight' is whole on rank 0 and again on rank 1"):
        engine.save_checkpoint("nowhere")


@on_ranks(2)
def test_a_parameter_that_its_group_did_not_use_is_an_error_on_all_ranks() -> None:
    define_group("experts", [[0], [1]])
    engine = engine_of(Model(rank()), 1, zero={"ignore_unused_parameters": False})
    engine.backward(engine(inputs(0, rank()), rank() == 0))
    who = "expert.weight, expert.bias" if rank() == 1 else r"those of rank\(s\) \[1\]"
    with pytest.raises(CallOrderError, match=f"got no gradient on any rank.*: {who}"):
        engine.step()
    engine.backward(engine(inputs(0, rank())))
    engine.step()
