"""Marking modules that are gathered whole: by class, by name, by the end of the name, and by the configuration."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.utils import z3_leaf_module as as_attribute
from deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)
from deepspeed.zero.model_states import find_units
from tests.engine.support import engine_of, inputs, rank
from tests.harness import on_ranks
from tests.harness.cases import Plain, seeded
from tests.harness.logged import logged
from tests.harness.toy_models import Layer


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Layer() for _ in range(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Layer(), Mixture(), Layer(), Mixture()])


def _units(model):
    return [unit.name for unit in find_units(model, granularity=0)]


def test_by_class_and_by_names_of_classes():
    model = Model()
    assert _units(model) == [
        "blocks.0", "blocks.1.experts.0", "blocks.1.experts.1", "blocks.2", "blocks.3.experts.0", "blocks.3.experts.1"
    ]  # fmt: skip
    mixtures = [model.blocks[1], model.blocks[3]]
    for form in (Mixture, "Mixture", f"{__name__}.Mixture"):
        assert set_z3_leaf_modules(model, [form]) == mixtures == get_z3_leaf_modules(model)
        assert _units(model) == ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]
        assert unset_z3_leaf_modules(model, [form]) == mixtures and get_z3_leaf_modules(model) == []
    assert as_attribute is z3_leaf_module and not z3_leaf_module(model)
    set_z3_leaf_module(model.blocks[3], True)
    assert z3_leaf_module(model.blocks[3]) and "blocks.3" in _units(model)
    for call in (set_z3_leaf_modules, unset_z3_leaf_modules):
        assert call(model, [nn.Conv2d, "Absent"], raise_if_not_found=False) == []
        with pytest.raises(DeepSpeedConfigError, match="Model has no module of the classes Conv2d, Absent"):
            call(model, [nn.Conv2d, "Absent"])
    with pytest.raises(DeepSpeedConfigError, match="expected classes"):
        set_z3_leaf_modules(model, [model.blocks[0]])


def test_by_name_and_by_suffix():
    model = Model()
    assert set_z3_leaf_modules_by_name(model, ["blocks.1", "blocks.9"]) == ([model.blocks[1]], ["blocks.9"])
    assert get_z3_leaf_modules(model) == [model.blocks[1]]
    assert set_z3_leaf_modules_by_name(model, ["blocks.1"], flag=False) == ([model.blocks[1]], [])
    found, missing = set_z3_leaf_modules_by_suffix(model, ["experts", "gate"])
    assert found == [model.blocks[1].experts, model.blocks[3].experts] and missing == ["gate"]
    assert _units(model) == ["blocks.0", "blocks.1.experts", "blocks.2", "blocks.3.experts"]
    with pytest.raises(DeepSpeedConfigError, match="no module of Model fits gate"):
        set_z3_leaf_modules_by_suffix(model, ["gate"])


@on_ranks(1)
def test_by_the_configuration() -> None:
    model = Model()
    zero = {"leaf_module": {"classes": ["nowhere.Absent"], "names": ["blocks.1"], "name_suffixes": ["3.experts"]}}
    engine = engine_of(model, 3, zero=zero)
    assert get_z3_leaf_modules(model) == [model.blocks[1], model.blocks[3].experts]
    assert z3_leaf_parameter(model.blocks[1].experts[0].rise.weight)
    assert not z3_leaf_parameter(model.blocks[0].rise.weight)
    with pytest.raises(DeepSpeedConfigError, match="leaf_module: no module fits blocks.7"):
        engine_of(model, 3, zero={"leaf_module": {"names": ["blocks.7"]}})
    assert not engine._runtime.is_retired, "nothing was changed"


@on_ranks(1)
def test_a_call_that_is_too_late_raises() -> None:
    model = Model()
    engine = engine_of(model, 3)
    with logged() as lines:
        deepspeed.utils.set_z3_leaf_modules(model, [Mixture])
    assert engine.global_steps == 0
    assert any("mark leaf modules before deepspeed.initialize" in line for line in lines)


class Experts(nn.Module):
    """A leaf of several buckets; which of its experts run is set from outside, for every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(9, 9)
        self.experts = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: list[int], recomputed: bool) -> torch.Tensor:
        x = x + torch.tanh(self.gate(x))
        for index in chosen:
            expert = self.experts[index]
            x = x + (checkpoint(expert, x, use_reentrant=False) if recomputed else expert(x))
        return x


class Sparse(nn.Module):
    """Two leaves with a layer between them; the last is called twice, and ``tied`` ones share weights."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.leaves = nn.ModuleList(Experts() for _ in range(2))
        self.between = Layer()
        if tied:
            for ours, theirs in zip(self.leaves[1].experts, self.leaves[0].experts, strict=True):
                ours.rise.weight = theirs.rise.weight

    def forward(self, x: torch.Tensor, step: int, of_rank: int, recomputed: bool) -> torch.Tensor:
        choose = torch.Generator().manual_seed(step * 31 + of_rank)
        for leaf in (self.leaves[0], self.between, self.leaves[1], self.leaves[1]):
            chosen = torch.randperm(4, generator=choose)[:2].tolist()
            x = leaf(x) if leaf is self.between else leaf(x, chosen, recomputed)
        return x.square().mean()


# Limits that leave a leaf gathered whole, in part or not at all after its forward, with gathers ahead and without.
LIMITS: dict[str, dict[str, Any]] = {
    "nothing ahead": {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    "everything ahead": {"stage3_max_reuse_distance": 0},
    "kept in part": {"stage3_max_reuse_distance": 1500},
    "few alive": {"stage3_prefetch_bucket_size": 400, "stage3_max_live_parameters": 700},
}


@pytest.mark.parametrize(
    ("limits", "tied", "recomputed"),
    [
        ("nothing ahead", False, False),
        ("everything ahead", True, True),
        ("kept in part", False, True),
        ("few alive", True, False),
    ],
)
@on_ranks(2)
def test_ranks_choose_different_parts_of_a_leaf_of_several_buckets(limits: str, tied: bool, recomputed: bool) -> None:
    zero = {"stage3_param_persistence_threshold": 0, "allgather_bucket_size": 200, **LIMITS[limits]}
    zero["leaf_module"] = {"classes": ["Experts"]}
    engine, plain = engine_of(seeded(lambda: Sparse(tied)), 3, zero=zero), Plain(lambda: Sparse(tied))
    assert sum(bucket.is_sharded for bucket in engine._runtime.buckets) >= 10
    for step in range(3):
        engine.backward(engine(inputs(step, rank()), step, rank(), recomputed))
        engine.step()
        plain.step(lambda model, of, step=step: model(inputs(step, of), step, of, False))
    plain.assert_masters(engine, rtol=1e-4, atol=1e-5)


def test_mark_that_programs_read():
    model = nn.Sequential(nn.Bilinear(2, 2, 2), nn.Linear(2, 2))
    set_z3_leaf_modules(model, [nn.Bilinear])
    assert model[0]._z3_leaf and not hasattr(model[1], "_z3_leaf")
