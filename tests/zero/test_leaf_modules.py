"""Marking modules that are gathered whole: by class, by name, by the end of the name, and by the configuration."""

from __future__ import annotations

import logging

import pytest
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import logger
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
from deepspeed.zero.units import find_units
from tests.engine.support import Layer, engine_of
from tests.harness import run_ranks


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


def check_configuration() -> None:
    model = Model()
    zero = {"leaf_module": {"classes": ["nowhere.Absent"], "names": ["blocks.1"], "name_suffixes": ["3.experts"]}}
    engine_of(model, 3, zero=zero)
    assert get_z3_leaf_modules(model) == [model.blocks[1], model.blocks[3].experts]
    assert z3_leaf_parameter(model.blocks[1].experts[0].rise.weight)
    assert not z3_leaf_parameter(model.blocks[0].rise.weight)
    with pytest.raises(DeepSpeedConfigError, match="leaf_module: no module fits blocks.7"):
        engine_of(Model(), 3, zero={"leaf_module": {"names": ["blocks.7"]}})


def test_by_the_configuration():
    run_ranks(check_configuration, 1)


def check_too_late() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    model = Model()
    engine = engine_of(model, 3)
    deepspeed.utils.set_z3_leaf_modules(model, [Mixture])
    logger.removeHandler(handler)
    assert engine.global_steps == 0
    assert any("mark leaf modules before deepspeed.initialize" in line for line in lines)


def test_too_late_is_said():
    run_ranks(check_too_late, 1)
