"""Attention implementations of the Transformers library: registers them, gives them to models, calls them.

A model names its implementation in its configuration. The library looks the name up in two registries at each call: one
of attention functions, one of functions that make the masks for them. Without a mask function the library passes no
mask, and padding becomes visible; so both are registered together here, and nowhere else.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from deepspeed.errors import DeepSpeedConfigError

NEEDS_WHOLE_MASKS = ("eager", "paged|eager", "flex_attention")
"""Implementations that need full masks, whose size grows with the square of the length."""


def takes_attention_by_name(model: Any) -> bool:
    """Returns whether an object is a model of the library, whose attention implementation can be set."""
    return hasattr(model, "set_attn_implementation")


def attention_name(config: Any) -> str | None:
    """Returns the name of the implementation that a configuration has; None where it has none."""
    return getattr(config, "_attn_implementation", None)


def names_attention(config: Any) -> bool:
    """Returns whether a configuration has the field that names an implementation, as those of the library do."""
    return hasattr(config, "_attn_implementation")


def use_attention(model: Any, name: str, attention: Callable[..., Any], mask: Callable[..., Any], what: str) -> None:
    """Registers an implementation and gives it to a model, in place.

    Args:
        model: A model of the library. Its configuration is changed; see :func:`own_configurations`.
        attention: Gets ``(layer, query, key, value, mask, **more)``; returns the output, and the probabilities or None.
        mask: Gets keyword arguments; returns the mask for ``attention``.

    Raises:
        DeepSpeedConfigError: The model's class does not use the registries.
    """
    register_attention(name, attention, mask)
    model.set_attn_implementation(name)
    if attention_name(model.config) != name:
        raise DeepSpeedConfigError(
            f"{what}: {type(model).__name__} does not take its attention from transformers' AttentionInterface, so it "
            "cannot be replaced; use a model class that does"
        )


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Registers an implementation; see :func:`use_attention` for the arguments."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def interface_of(name: str, layer: nn.Module) -> Callable[..., Any]:
    """Returns the attention function of the implementation ``name``; "eager" is that of the layer's own module.

    Raises:
        DeepSpeedConfigError: The layer's module has no function for "eager".
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name in ALL_ATTENTION_FUNCTIONS:
        return ALL_ATTENTION_FUNCTIONS[name]
    own = [getattr(sys.modules.get(base.__module__), "eager_attention_forward", None) for base in type(layer).__mro__]
    eager = next((function for function in own if function is not None), None)
    if eager is None:
        raise DeepSpeedConfigError(
            f"{type(layer).__name__}: its module has no eager_attention_forward, which the attention implementation "
            f'{name!r} stands for; use attn_implementation="sdpa"'
        )
    return eager


def check_use_of_attention(model: Any, name: str, attention: Any, mask: Any, what: str) -> None:
    """Raises what :func:`use_attention` would raise, without changing the model."""
    probe: Any = copy.copy(model)
    probe._modules, probe.config = {}, copy.deepcopy(model.config)
    use_attention(probe, name, attention, mask, what)


AttentionFunctions = Callable[[str], tuple[Callable[..., Any], Callable[..., Any]]]
"""Returns the attention and the mask function that wrap those of an implementation, given its name."""


def attention_names(model: nn.Module) -> set[str]:
    """Returns the names of the attention implementations that the model's modules use."""
    return {name for module in configured_modules(model) if (name := attention_name(module.config)) is not None}


def check_wrapped_attention(model: Any, suffix: str, functions: AttentionFunctions, what: str) -> None:
    """Raises what :func:`use_attention` would raise for wrapped implementations, without changing the model."""
    for name in attention_names(model):
        check_use_of_attention(model, f"{name}{suffix}", *functions(name), what)


def wrap_attention(model: nn.Module, suffix: str, functions: AttentionFunctions) -> None:
    """Replaces the attention implementations of a model, a wrapper or layers of one by wrapped ones, in place.

    The model's configuration is copied first. Implementations that are wrapped already are not changed.
    """
    own_configurations(model)
    for module in configured_modules(model):
        name = attention_name(module.config)
        if name is not None and not name.endswith(suffix):
            register_attention(f"{name}{suffix}", *functions(name))
            set_attention_name(module.config, f"{name}{suffix}")


def name_attention(layers: nn.Module, name: str) -> None:
    """Sets the registered implementation ``name`` for layers that were taken out of a model, in place."""
    for module in configured_modules(layers):
        set_attention_name(module.config, name)


def set_attention_name(config: Any, name: str) -> None:
    """Sets the name of a registered implementation in a configuration."""
    config._attn_implementation = name


def configured_modules(model: nn.Module) -> Iterator[Any]:
    """Yields the modules whose configuration names their attention implementation."""
    for module in model.modules():
        if names_attention(getattr(module, "config", None)):
            yield module


def own_configurations(model: nn.Module) -> None:
    """Copies the configuration that the model's modules share, as another model may share it too."""
    copies: dict[int, Any] = {}
    for module in configured_modules(model):
        module.config = copies.setdefault(id(module.config), copy.deepcopy(module.config))


def has_attention(name: str) -> bool:
    """Returns whether the library has an implementation of that name; loads one that the hub has."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "/" in name and name not in ALL_ATTENTION_FUNCTIONS:
        from transformers.integrations.hub_kernels import load_and_register_attn_kernel

        load_and_register_attn_kernel(name)
    return name in ALL_ATTENTION_FUNCTIONS


def known_attention_names() -> list[str]:
    """Returns the names of all attention implementations registered in transformers, sorted."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return sorted(ALL_ATTENTION_FUNCTIONS.valid_keys())


def call_attention(name: str, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the implementation ``name`` for a layer that has another one set.

    Args:
        layer: The attention module; the number of query heads per key head is read from the tensors instead.
        *args: Query, key, value ``[batch, heads, tokens, width]``, mask.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    groups = args[0].size(1) // args[1].size(1)
    config = _AttributeOverride(layer.config, _attn_implementation=name)
    return ALL_ATTENTION_FUNCTIONS[name](
        _AttributeOverride(layer, config=config, num_key_value_groups=groups), *args, **kwargs
    )


class _AttributeOverride:
    """Wraps an object and replaces some of its attributes, for attention functions that read them from the layer."""

    def __init__(self, original: Any, **changed: Any) -> None:
        self.__dict__.update(changed, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
