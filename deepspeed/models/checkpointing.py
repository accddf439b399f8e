"""Switches a Transformers model's own activation checkpointing on and off, by the library's new or old names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_FUNCTION, _SWITCH = "_gradient_checkpointing_func", "gradient_checkpointing"


def switch_of(model: nn.Module, verb: str) -> Callable[..., Any] | None:
    """Returns the model's method that switches checkpointing; None where it has none."""
    names = (f"activation_checkpointing_{verb}", f"gradient_checkpointing_{verb}")
    return next((found for name in names if callable(found := getattr(model, name, None))), None)


def recomputed_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the repeated layers of a Transformers model that are recomputed in backward while it trains, in order."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return [layer for layers in lists for layer in layers if getattr(layer, _SWITCH, False)]


def switch_layer(layer: nn.Module, is_on: bool) -> None:
    """Sets whether one of :func:`recomputed_layers` is recomputed."""
    setattr(layer, _SWITCH, is_on)


def checkpoint_layers(model: Any) -> bool:
    """Makes a model checkpoint its layers, without reentrant backward, in place; False if it does not support it."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return False
    is_on = getattr(model, "is_activation_checkpointing", None)
    if not (model.is_gradient_checkpointing if is_on is None else is_on):
        enable = switch_of(model, "enable")
        assert enable is not None
        enable({"use_reentrant": False})
    return True


def replace_checkpoint_functions(model: nn.Module, make: Callable[[Any], Any]) -> None:
    """Replaces the functions that checkpoint layers, in place, by ``make(function)``."""
    for module in model.modules():
        function = module.__dict__.get(_FUNCTION)
        if function is not None:
            setattr(module, _FUNCTION, make(function))
