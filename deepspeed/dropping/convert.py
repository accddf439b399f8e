"""Letting the layers of a model drop tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from deepspeed.dropping.tokens import RandomLayerTokenDrop, TokenDrop

_WRAPPED = ".random_ltd_layer"


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module]) -> Any:
    """Lets every layer of one class drop tokens, as ``data_efficiency.data_routing.random_ltd`` says.

    Before or after ``deepspeed.initialize``. Names of parameters, types and checkpoints stay as they are.

    Args:
        model: The model, or the engine around it.
        convert_type: Class of the layers.

    Returns:
        ``model``.

    Raises:
        ValueError: It has no such layer.
    """
    inner = getattr(model, "module", model) if hasattr(model, "random_ltd_initialize") else model
    layers = [layer for layer in inner.modules() if isinstance(layer, convert_type)]
    if not layers:
        raise ValueError(f"convert_to_random_ltd: the model has no layer of the class {convert_type.__name__}")
    for layer in layers:
        RandomLayerTokenDrop(layer)
    if inner is not model:
        model.random_ltd_initialize()
    return model


def attach(model: nn.Module, numbers: list[int], drop: TokenDrop) -> None:
    """Gives the converted layers with these numbers their common state.

    Args:
        model: The model.
        numbers: Each the last number in the name of a layer (``model.layers.3`` is layer 3).
        drop: What they share.

    Raises:
        ValueError: There is not one converted layer for each number.
    """
    converted = {name: layer for name, layer in model.named_modules() if isinstance(layer, RandomLayerTokenDrop)}
    by_number: dict[int, list[RandomLayerTokenDrop]] = {}
    for name, layer in converted.items():
        own = [int(part) for part in name.split(".") if part.isdigit()]
        by_number.setdefault(own[-1] if own else -1, []).append(layer)
    wrong = [number for number in numbers if len(by_number.get(number, [])) != 1]
    if wrong:
        raise ValueError(
            f"data_efficiency.data_routing.random_ltd.random_ltd_layer_id: {wrong} name(s) no converted layer, or more "
            f"than one; converted are {', '.join(converted) or 'none'}"
        )
    for number in numbers:
        by_number[number][0]._token_drop = drop


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict of the published package without its wrappers' names; one of this package is as it should be."""
    return {name.replace(_WRAPPED, ""): value for name, value in state_dict.items()}


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """The model's state dict under its own names."""
    return remove_random_ltd_state_dict(model.state_dict())
