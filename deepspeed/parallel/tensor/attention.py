"""Reads the numbers of heads of an attention module, and sets them when heads are divided."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.models.attention_modules import AttentionHeads, change_heads
from deepspeed.parallel.tensor.split import Heads

_PER_HEAD = ("alibi", "position_bias")
"""Arguments that have something for every head."""

_MASK = "attention_mask"
"""The argument that may have heads as its second of four dimensions: where ALiBi is added to it, for example."""


def set_head_counts(module: nn.Module, whole: AttentionHeads, heads: Heads, place: int) -> dict[str, tuple[int, int]]:
    """Sets the numbers of an attention module to those of a rank's part.

    Args:
        module: The module.
        whole: What it had.
        heads: How they are divided.
        place: This rank's.

    Returns:
        By attribute: the number before and after.
    """
    low, high = heads.of_query(place)
    first, last = heads.of_key_value(place)
    return change_heads(module, whole, high - low, last - first)


def slice_arguments(module: nn.Module, whole: AttentionHeads, heads: Heads, place: int) -> None:
    """Lets an attention module see this rank's part of what it is handed per head (ALiBi, position biases).

    Args:
        module: The module.
        whole: What it had.
        heads: How they are divided.
        place: This rank's.
    """
    low, high = heads.of_query(place)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name in _PER_HEAD:
            if isinstance(value := kwargs.get(name), torch.Tensor):
                kwargs = {**kwargs, name: _part_of_heads(value, whole.query, low, high)}
        if isinstance(mask := kwargs.get(_MASK), torch.Tensor) and mask.dim() == 4:
            kwargs = {**kwargs, _MASK: _part_of_heads(mask, whole.query, low, high)}
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _part_of_heads(value: torch.Tensor, count: int, low: int, high: int) -> torch.Tensor:
    """Returns the heads of this rank along the first of 3 dimensions or the second of 4; other tensors whole."""
    if value.dim() == 4:
        return value[:, low:high] if value.shape[1] == count else value
    if value.dim() == 3 and value.shape[0] % count == 0:
        return value.view(-1, count, *value.shape[1:])[:, low:high].flatten(0, 1)
    return value
