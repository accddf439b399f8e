"""Attention of all packed documents in one call, by torch's attention of sequences of any lengths (flash attention).

It runs on CUDA devices of compute capability 8 and newer in 16 bits. Elsewhere attention runs once per document.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.parallel.sequence.context import PackedRow

_WIDEST = 256  # heads that flash attention takes


def attends_at_once(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Returns whether :func:`attend_at_once` supports these tensors, ``[batch, heads, tokens, width]``."""
    return (
        query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and dropout == 0.0
        and query.size(-1) == key.size(-1) == value.size(-1) <= _WIDEST
        and query.size(-1) % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and _is_known()
    )


def attend_at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Sequence[PackedRow],
    *,
    is_causal: bool,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Returns the attention within each document: ``[batch, heads, tokens, width]``; 0 for tokens of no document.

    Arguments are those of ``transformers_attention.attend``.
    """
    from torch.nn.attention import varlen

    batch, heads, tokens, width = query.shape
    lengths = tuple(length for row in documents for length in row.lengths)
    if not lengths:
        return torch.zeros_like(query)
    order = None
    if sum(lengths) < batch * tokens or any(row.order is not None for row in documents):
        order = torch.cat([_order(row, query.device) + number * tokens for number, row in enumerate(documents)])
    parts = [tensor.transpose(1, 2).reshape(batch * tokens, -1, width) for tensor in (query, key, value)]
    if order is not None:
        parts = [part.index_select(0, order) for part in parts]
    ends = _ends(lengths, query.device)
    sides = (-1 if window is None or not is_causal else window - 1, 0 if is_causal else -1)
    is_grouped, longest = query.size(1) != key.size(1), max(lengths)
    query, key, value = parts
    found: Any = varlen.varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scale, window_size=sides, enable_gqa=is_grouped
    )
    if order is not None:
        found = found.new_zeros(batch * tokens, heads, width).index_copy(0, order, found)
    attended: torch.Tensor = found.view(batch, tokens, heads, width).transpose(1, 2)
    return attended


def _order(row: PackedRow, device: torch.device) -> torch.Tensor:
    """Returns the numbers of a sequence's tokens in the order of its documents: 1-D int64."""
    return torch.arange(sum(row.lengths), device=device) if row.order is None else row.order.to(device)


@functools.lru_cache(maxsize=16)
def _ends(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Returns where documents begin and the last one ends, int32; the same tensor for all layers of a pass."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    return ends.to(device, non_blocking=True)


@functools.cache
def _is_known() -> bool:
    """Returns whether this torch has the function with these arguments; before 2.12 it differs."""
    try:
        from torch.nn.attention import varlen
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= inspect.signature(varlen.varlen_attn).parameters.keys()
