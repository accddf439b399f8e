"""Recognizes layers of the Transformers library that pass states from token to token, by what their forward reads."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, TypeGuard

import torch
from torch import nn

from deepspeed.models.configurations import layer_types_of
from deepspeed.models.layers import is_of_library

_CACHES = ("cache_params", "past_key_values", "past_key_value")
_READ = {"get_conv_state", "update_conv_state", "get_recurrent_state", "update_recurrent_state", "get_linear_cache"}
_INITIAL = {"initial_state", "initial_states"}
_ATTENTION = ("full_attention", "sliding_attention", "attention", "sparse", "dense", "moe")
"""Types of layers in a configuration that pass no states."""
_NAMES = (
    "mamba", "ssm", "rwkv", "recurrent", "linearattention", "deltanet", "retention", "hyena", "fourier", "lightning",
    "lstm",
)  # fmt: skip
_BY_TOKEN = ("norm", "mlp", "rotaryembedding")


def is_token_mixer(module: nn.Module) -> bool:
    """Returns whether a layer passes states along tokens: its forward reads them from a cache.

    A layer of the library also counts if it has a convolution of one dimension over more than one token.
    """
    return bool(_READ & _words_of(module)) or (is_of_library(type(module)) and any(map(_mixes, module.children())))


def _mixes(module: nn.Module) -> TypeGuard[nn.Conv1d]:
    return isinstance(module, nn.Conv1d) and any(size > 1 for size in module.kernel_size)


def continues_states(module: nn.Module) -> bool:
    """Returns whether a layer continues from the states of its cache where it computes several tokens.

    It passes the recurrent state to its scan by name, or has none (short convolutions).
    """
    words = _words_of(module)
    if "update_conv_state" not in words:
        return False
    return "get_recurrent_state" not in words or bool(_INITIAL & words)


def attends(module: nn.Module) -> bool:
    """Returns whether the forward of a module calls an attention function of the library itself."""
    return "ALL_ATTENTION_FUNCTIONS" in _words_of(module)


def cache_argument(module: nn.Module) -> str:
    """Returns the name of the argument of a layer's forward that takes the cache; empty if there is none."""
    known = inspect.signature(module.forward).parameters
    return next((name for name in _CACHES if name in known), "")


def _words_of(module: nn.Module) -> set[str]:
    """Returns the names that the forward of a module reads, and the names of arguments that it passes."""
    code = getattr(inspect.unwrap(module.forward), "__code__", None)
    if code is None:
        return set()
    words = set(code.co_names)
    for value in code.co_consts:
        words.update(_strings(value))
    return words


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, frozenset)):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, CodeType):  # a comprehension
        yield from value.co_names


def mixing_by_name(model: nn.Module, mixers: Iterable[nn.Module]) -> Iterator[str]:
    """Yields the modules outside of ``mixers`` that need neighboring tokens, by the names of their classes.

    These names are all there is to see of a recurrence in a module's own code. What the names of all classes of a model
    begin with, and types of layers in its configuration, count only in models without ``mixers``.
    """
    mixers = list(mixers)
    if not mixers:
        for kind in sorted(set(layer_types_of(getattr(model, "config", None))) - set(_ATTENTION)):
            yield f"layers of type {kind}"
    inside = {id(module) for mixer in mixers for module in mixer.modules()}
    own = [type(module).__name__ for module in model.modules() if type(module).__module__ == type(model).__module__]
    common = len(os.path.commonprefix(own)) if mixers else 0
    for name, module in model.named_modules():
        kind = type(module).__name__
        word = kind[common:].lower() if kind in own else kind.lower()
        if id(module) in inside or any(id(part) in inside for part in module.modules()) or word.endswith(_BY_TOKEN):
            continue
        if _mixes(module):
            yield f"{name}: {kind} over {module.kernel_size[0]} tokens"
        elif isinstance(module, nn.RNNBase) or any(part in word for part in _NAMES):
            yield f"{name}: {kind}"


def is_block(module: nn.Module) -> bool:
    """Returns whether a module is one of the library's layers that are checkpointed as a whole."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


class LayerStates:
    """The states of one layer in one call, as the library's layers read and write them; stands for its cache."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Returns None, so that the layer extends its tokens by :meth:`update_conv_state`."""

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 0, **_: Any
    ) -> torch.Tensor:
        """Returns ``[batch, channels, kernel + tokens]``: what comes before ``conv_states``, and these."""
        return self.extend(conv_states, conv_kernel_size)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Returns the state before the layer's tokens; None: zeros."""
        return self.before()

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Takes the state after the layer's tokens."""
        self.after(recurrent_states)
        return recurrent_states

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False: states are not recorded by token."""
        return False

    def extend(self, tokens: torch.Tensor, kernel: int) -> torch.Tensor:
        """Returns ``tokens``, ``[batch, channels, tokens]``, behind the ``kernel`` tokens before them."""
        raise NotImplementedError

    def before(self) -> torch.Tensor | None:
        """Returns the recurrent state before the tokens; None: zeros."""
        raise NotImplementedError

    def after(self, state: torch.Tensor) -> None:
        """Takes the recurrent state after the tokens."""
        raise NotImplementedError
