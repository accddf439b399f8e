"""The engine feature ``float8``: linear layers multiply in eight bits, by torchao.

A layer keeps its class, hooks, name and parameters and gets torchao's forward in front, so masters, moments,
checkpoints and exports are those of a run without float8.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed.config.sections.float8 import Float8
from deepspeed.engine_feature import TENSOR_RANKS, Conflict, EngineFeature, EngineSetup
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.give_base import give_base
from deepspeed.logging import log_dist

SIDE = 16
"""Sides of weights must be multiples of this for the devices' products."""


class Float8Layers(EngineFeature):
    """Linear layers whose products are computed in float8."""

    title = "float8 products"
    setting = "float8"
    conflicts = (
        Conflict(
            "float8.enabled",
            lambda setup: setup.root.float8 is not None and setup.root.float8.enabled,
            TENSOR_RANKS,
            "scales of cut layers would be those of a rank's part",
            "leave float8 out, or set tensor_parallel.autotp_size to 1 and let ZeRO stage 3 share the weights",
        ),
    )

    @override
    def refuse(self, setup: EngineSetup) -> None:
        section = setup.root.float8
        if section is None or not section.enabled:
            return
        if section.gather == "float8" and setup.root.zero_optimization.stage == 3:
            raise NotYetSupportedError(
                'float8.gather="float8": this release gathers in the compute dtype; set it to "none"'
            )
        if section.gather == "float8":
            log_dist("float8.gather has no effect: weights are gathered for a pass at ZeRO stage 3 only")
        _check(torchao_config(section), setup.device)

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        if setup.root.float8 is not None and setup.root.float8.enabled:
            use_float8(setup.model, setup.root.float8)
        return {}


FEATURE = Float8Layers()


def torchao_config(section: Float8) -> Any:
    """Returns torchao's configuration of a recipe.

    Raises:
        DeepSpeedConfigError: torchao is missing.
    """
    config = _torchao().Float8LinearConfig.from_recipe_name(section.recipe)
    return replace(config, emulate=section.emulate)


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise DeepSpeedConfigError(
            f"float8: expected torchao, found none that can be imported ({error}). Run pip install torchao, or leave "
            "the section out"
        ) from error


def _check(config: Any, device: torch.device) -> None:
    """Raises if ``device`` cannot train a small layer by ``config``."""
    try:
        layer = _torchao().convert_to_float8_training(
            nn.Linear(SIDE, SIDE, device=device, dtype=torch.bfloat16), config=config
        )
        layer(torch.ones(SIDE, SIDE, device=device, dtype=torch.bfloat16)).sum().backward()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise DeepSpeedConfigError(
            f"float8: torchao cannot multiply on {device} by this recipe: {str(error).splitlines()[0]}. Use a device "
            "with float8 products, or set float8.emulate for a trial on another"
        ) from error


def use_float8(model: nn.Module, section: Float8) -> None:
    """Makes linear layers of a model, or of a pipeline stage, multiply in float8, in place.

    Raises:
        DeepSpeedConfigError: torchao is missing, or the model has no such layer.
    """
    config, whole = torchao_config(section), _names_of(model)
    converted, left = [], []
    for name, layer in _linear_layers(model):
        model_name = next((whole[own] + name.removeprefix(own) for own in whole if name.startswith(own)), name)
        if any(part in model_name for part in section.skip):
            continue
        if layer.in_features % SIDE or layer.out_features % SIDE:
            left.append(f"{model_name} ({layer.out_features} x {layer.in_features})")
            continue
        _give_products(layer, config)
        converted.append(model_name)
    if not converted and not getattr(model, "is_pipeline", False):
        raise DeepSpeedConfigError(
            f"float8: expected linear layers beside {section.skip} with sides that are multiples of {SIDE}, found none "
            f"in {type(model).__name__}{' but ' + ', '.join(left[:4]) if left else ''}. Leave the section out"
        )
    log_dist(
        f"float8: {len(converted)} linear layers multiply in float8 ({section.recipe}"
        f"{', emulated' if section.emulate else ''})"
        + (f"; left in the compute dtype, as a side is no multiple of {SIDE}: {', '.join(left)}" if left else "")
    )


def _names_of(model: Any) -> Mapping[str, str]:
    """Maps beginnings of names in a pipeline to those in the Transformers model that it was made of; else nothing."""
    names: Mapping[str, str] = model.names_in_transformers() if getattr(model, "is_pipeline", False) else {}
    return names


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the layers that compute what ``nn.Linear`` does, and nothing else."""
    for name, module in model.named_modules():
        is_plain = type(module).forward is nn.Linear.forward and "forward" not in module.__dict__
        if isinstance(module, nn.Linear) and is_plain:
            yield name, module


def _give_products(layer: nn.Linear, config: Any) -> None:
    """Puts torchao's forward in front of a layer, with the settings that torchao's converter gives one like it."""
    like = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    made = _torchao().convert_to_float8_training(like, config=config)
    give_base(layer, type(made))
    for name, value in made.__dict__.items():
        layer.__dict__.setdefault(name, value)
