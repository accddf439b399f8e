"""The engine feature ``float8``: linear layers multiply in eight bits, by torchao.

A layer keeps its class, hooks, name and parameters and gets torchao's forward in front, so masters, moments,
checkpoints and exports are those of a run without float8.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed.config.sections.float8 import Float8
from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.give_base import give_base
from deepspeed.logging import log_dist
from deepspeed.parallel.tensor.linear import ColumnLinear, RowLinear
from deepspeed.zero.float8_gather import Float8Transport, exchange_scales
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime

SIDE = 16
"""Sides of weights must be multiples of this for the devices' products."""


class Float8Layers(EngineFeature):
    """Linear layers whose products are computed in float8."""

    title = "float8 products"
    setting = "float8"

    @override
    def refuse(self, setup: EngineSetup) -> None:
        section = setup.root.float8
        if section is None or not section.enabled:
            return
        if section.gather == "float8":
            _refuse_gather(setup, section)
        _check(torchao_config(section), setup.device)

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        if setup.root.float8 is not None and setup.root.float8.enabled:
            use_float8(setup.model, setup.root.float8)
        return {}

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks | None:
        section = setup.root.float8
        if section is None or not section.enabled or section.gather != "float8":
            return None
        target = torchao_config(section).cast_config_weight.target_dtype
        weights = _gathered_weights(setup.model)
        made = [
            bucket.gather_in_float8(
                [tile for tile, parameter in enumerate(bucket.params) if id(parameter) in weights], target
            )
            for bucket in runtime.buckets
        ]
        return ScaleHooks([transport for transport in made if transport is not None])


FEATURE = Float8Layers()


def _refuse_gather(setup: EngineSetup, section: Float8) -> None:
    """Raises for what cannot gather in float8; logs where nothing is gathered."""
    root, zero = setup.root, setup.root.zero_optimization
    if zero.stage != 3:
        log_dist("float8.gather has no effect: weights are gathered for a pass at ZeRO stage 3 only")
        return
    others = {
        f'float8.recipe="{section.recipe}", which casts a weight with other scales in backward': (
            section.recipe != "tensorwise"
        ),
        "zero_optimization.offload_param": zero.offload_param is not None,
        "zero_optimization.zero_quantized_weights": zero.zero_quantized_weights,
        "communication_compression.weights": root.communication_compression.weights is not None,
        "weights in fp32, where a second cast may have another scale (set bf16.enabled or fp16.enabled)": not (
            root.bf16.enabled or root.fp16.enabled
        ),
    }
    found = [name for name, is_used in others.items() if is_used]
    if found:
        raise NotYetSupportedError(
            f'float8.gather="float8" with {" and ".join(found)}: not supported; set gather to "none", or change that'
        )


def _gathered_weights(model: nn.Module) -> set[int]:
    """Returns the ``id`` of the weights that only torchao's products read."""
    users = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
    kind = _torchao(".float8_linear").Float8Linear
    return {id(layer.weight) for layer in model.modules() if isinstance(layer, kind) and users[id(layer.weight)] == 1}


class ScaleHooks(EngineHooks):
    """Makes the scales of gathered weights anew after each update."""

    def __init__(self, transports: list[Float8Transport]) -> None:
        self._transports = transports
        exchange_scales(transports)

    @override
    def after_update(self, global_steps: int, *, was_skipped: bool) -> None:
        if not was_skipped:
            exchange_scales(self._transports)

    @override
    def resume(self, global_steps: int, skipped_steps: int) -> None:
        exchange_scales(self._transports)


def torchao_config(section: Float8) -> Any:
    """Returns torchao's configuration of a recipe.

    Raises:
        DeepSpeedConfigError: torchao is missing.
    """
    config = _torchao().Float8LinearConfig.from_recipe_name(section.recipe)
    return replace(config, emulate=section.emulate)


def _torchao(module: str = "") -> Any:
    try:
        return importlib.import_module(f"torchao.float8{module}")
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
        if isinstance(layer, (ColumnLinear, RowLinear)):
            layer.tensor_cut.products = Float8ProductBackend(layer, config)
        else:
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
    return model.names_in_transformers() if getattr(model, "is_pipeline", False) else {}


def _linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the layers that compute what ``nn.Linear`` does, and nothing else."""
    for name, module in model.named_modules():
        is_plain = type(module).forward is nn.Linear.forward and "forward" not in module.__dict__
        is_cut = isinstance(module, (ColumnLinear, RowLinear)) and not module.tensor_cut.is_transposed
        if isinstance(module, nn.Linear) and (is_plain or is_cut):
            yield name, module


def _give_products(layer: nn.Linear, config: Any) -> None:
    """Puts torchao's forward in front of a layer, with the settings that torchao's converter gives one like it."""
    made = _like(layer, config)
    give_base(layer, type(made))
    for name, value in made.__dict__.items():
        layer.__dict__.setdefault(name, value)


def _like(layer: nn.Linear, config: Any) -> Any:
    """Returns the layer that torchao's converter makes of one with the sides of ``layer``, without values."""
    like = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    return _torchao().convert_to_float8_training(like, config=config)


class Float8ProductBackend:
    """The products of a cut layer in float8, with the scales of the whole layer.

    A scale that covers a cut dimension is that of the greatest value on all ranks of the layer, which must all compute
    its products in one order. Scales along the other dimension are a rank's own already.
    """

    def __init__(self, layer: ColumnLinear | RowLinear, config: Any) -> None:
        self._settings, self._products = config, _like(layer, config).linear_mm_config
        self._channel, self._name = layer.tensor_cut.channel, layer.tensor_cut.name
        # the dimension of each operand that is cut; the third one is whole on every rank
        is_column = isinstance(layer, ColumnLinear)
        self._cut_dims = {"weight": 1, "grad_output": 1} if is_column else {"weight": 0, "input": 1}

    def output(self, values: torch.Tensor, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns ``values @ weight.T``, both 2-D, with the scales of the whole operands."""
        config = self._settings
        first = self._cast(values, config.cast_config_input, "input", -1, scales)
        return torch.mm(first, self._cast(weight.t(), config.cast_config_weight, "weight", 0, scales))

    def of_input(self, gradient: torch.Tensor, weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns ``gradient @ weight``, both 2-D, with the scales of the whole operands."""
        config = self._settings
        first = self._cast(gradient, config.cast_config_grad_output, "grad_output", -1, scales)
        second = self._cast(weight.t(), config.cast_config_weight_for_grad_input, "weight", -1, scales)
        return torch.mm(first, second.t())

    def of_weight(self, gradient: torch.Tensor, values: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns ``gradient.T @ values``, both 2-D, with the scales of the whole operands."""
        config = self._settings
        first = self._cast(gradient, config.cast_config_grad_output_for_grad_weight, "grad_output", 0, scales)
        return torch.mm(first.t(), self._cast(values, config.cast_config_input_for_grad_weight, "input", 0, scales))

    def _cast(self, operand: torch.Tensor, how: Any, role: str, dim: int, scales: dict[str, torch.Tensor]) -> Any:
        """Returns an operand in float8 as a torchao tensor; as it is where the recipe leaves it so.

        Args:
            operand: 2-D; of a weight the transpose, ``[in, out]``.
            how: torchao's settings of the cast.
            role: ``input``, ``weight`` or ``grad_output``.
            dim: The dimension that a row's scale covers, by a recipe with one scale per row.
            scales: Scales of whole tensors by role, of earlier casts.
        """
        if how.scaling_type.name == "DISABLED":
            return operand
        utils, tensors = _torchao(".float8_utils"), _torchao(".float8_training_tensor")
        is_whole = how.scaling_granularity.name == "TENSORWISE"
        axis = None if is_whole else dim
        scale = scales.get(role) if is_whole else None
        if scale is None:
            greatest = utils.tensor_to_amax(operand, scaling_granularity=how.scaling_granularity, axiswise_dim=axis)
            if role in self._cut_dims and (is_whole or dim % 2 == self._cut_dims[role]):
                flat = greatest.reshape(-1)
                parts = self._channel.gather(flat, [flat.numel()] * self._channel.size, f"a scale of {self._name}")
                greatest = torch.stack(parts).amax(0).view(greatest.shape)
            powers = self._settings.round_scales_to_power_of_2
            scale = utils.amax_to_scale(greatest, how.target_dtype, round_scales_to_power_of_2=powers)
            if is_whole:
                scales[role] = scale
        kind = tensors.GemmInputRole(role)
        return tensors.hp_tensor_and_scale_to_float8(operand, scale, how.target_dtype, self._products, kind, axis)
