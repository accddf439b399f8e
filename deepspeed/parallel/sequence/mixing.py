"""Layers that mix along the sequence where an attention function does not reach: their result on a shard is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.configurations import layer_types_of

_WHOLE = ("full_attention", "sliding_attention", "attention", "sparse", "dense", "moe")
_NAMES = (
    "mamba",
    "ssm",
    "rwkv",
    "recurrent",
    "linearattention",
    "deltanet",
    "retention",
    "hyena",
    "fourier",
    "lightning",
)
_WORDS = "linear attention, state-space and recurrent layers, convolutions"


def refuse_mixing_layers(model: nn.Module) -> None:
    """Raises where some layer needs its neighbours' tokens and does not get them by attention.

    Raises:
        DeepSpeedConfigError: There is one; it is named.
    """
    found = list(_mixing(model))
    if found:
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(model).__name__} mixes tokens outside of its attention function "
            f"({', '.join(found[:4])}{', ...' if len(found) > 4 else ''}); such layers ({_WORDS}) give wrong results "
            "on a part of a sequence, without an error. Train it without sequence_parallel_size"
        )


def _mixing(model: nn.Module) -> Iterator[str]:
    for kind in sorted(set(layer_types_of(getattr(model, "config", None))) - set(_WHOLE)):
        yield f"layers of type {kind}"
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.RNNBase) or any(word in kind.lower() for word in _NAMES):
            yield f"{name}: {kind}"
        elif isinstance(module, nn.Conv1d) and any(size > 1 for size in module.kernel_size):
            yield f"{name}: {kind} over {module.kernel_size[0]} tokens"
