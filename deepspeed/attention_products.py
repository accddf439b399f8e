"""Counts the operations of the fused attention kernels.

The formulas of ``torch.utils.flop_counter`` refuse keys with fewer heads than queries before torch 2.12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten


def _forward(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_args: Any, **_kwargs: Any) -> int:
    return int(sdpa_flop_count(query, _repeated(key, query), _repeated(value, query)))


def _backward(
    gradient: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_args: Any, **_kwargs: Any
) -> int:
    return int(sdpa_backward_flop_count(gradient, query, _repeated(key, query), _repeated(value, query)))


def _repeated(shape: Sequence[int], query: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape of keys or values ``[B, heads, S, width]`` with the heads of the queries."""
    return (shape[0], query[1], *shape[2:])


OPERATIONS_OF_ATTENTION: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_efficient_attention: _forward,
    _aten._scaled_dot_product_flash_attention: _forward,
    _aten._scaled_dot_product_cudnn_attention: _forward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    _aten._scaled_dot_product_efficient_attention_backward: _backward,
    _aten._scaled_dot_product_flash_attention_backward: _backward,
    _aten._scaled_dot_product_cudnn_attention_backward: _backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
"""By operator, a function of the shapes of its arguments; ``FlopCounterMode`` takes them as ``custom_mapping``."""
