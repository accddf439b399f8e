"""Attention of one block of keys with the logarithm of its sum of exponentials, and its backward.

torch's fused kernels compute it (flash attention on GPUs, and its twin for CPUs). They make no tensor of scores. Blocks
that they do not take are computed in small operations, see :func:`tile_of`.

Shapes: queries are ``[batch, heads, queries, width]``, keys and values ``[batch, key heads, keys, width]``, heads a
multiple of key heads; ``hidden`` is True for hidden pairs, ``[batch or 1, 1, queries, keys]``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn import functional

from deepspeed.logging import log_dist_once

_MASK_SIDE = 4096  # queries, and keys, of a mask for a fused kernel
_TILE_SIDE = 1024  # queries, and keys, of a tile of scores in small operations


def tile_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, has_masks: bool) -> int | None:
    """Returns the most queries, and keys, of one block; None: blocks may have any size."""
    kernel = _kernel_of(query, key, value, has_masks)
    if kernel != "small":
        return _MASK_SIDE if has_masks else None
    what = "windows and documents" if has_masks else f"{query.dtype} heads of {query.size(-1)}"
    if query.device.type != "meta":
        log_dist_once(
            f"attention over keys of other ranks or chunks runs in small operations, many times as slow as a fused "
            f"kernel: there is none for {what} on {query.device.type}"
        )
    return _TILE_SIDE


def attend_to_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the attention of queries to a block, and its ``lse`` ``[batch, heads, queries]`` in ``sum_dtype``.

    With ``is_causal`` there are as many keys as queries, and the i-th query sees the first i + 1 keys. ``lse`` is
    ``-inf`` for queries that see nothing.
    """
    kernel = _kernel_of(query, key, value, hidden is not None)
    if kernel == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_padded(query, key, value), is_causal=is_causal, attn_mask=_added(hidden, query), scale=scale
        )
        if hidden is not None:  # the kernel returns 0 for queries that see nothing
            lse = lse.masked_fill(hidden.all(-1), float("-inf"))
    elif kernel == "flash":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(
            *_padded(query, key, value, multiple=8), is_causal=is_causal, scale=scale
        )[:2]
    else:
        scores = _scores(query, key, scale, is_causal, hidden)
        lse = scores.logsumexp(-1)
        shares = torch.exp(scores - finite(lse).unsqueeze(-1))
        out, lse = (shares @ _wide(value).unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)
    return out[..., : value.size(-1)], lse


def block_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    hidden: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value by one block of keys.

    ``gradient`` is that of ``out``, the attention to all blocks, and ``lse`` belongs to all of them too; it is finite.
    """
    kernel = _kernel_of(query, key, value, hidden is not None)
    if kernel == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *_padded(gradient, query, key, value, out),
            lse,
            0.0,
            is_causal,
            attn_mask=_added(hidden, query),
            scale=scale,
        )
    elif kernel == "flash":
        random = [torch.empty(2, dtype=torch.uint64, device=query.device)] * 2  # read by dropout only
        lengths = None, None, query.size(2), key.size(2)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *_padded(gradient, query, key, value, out, multiple=8),
            *(lse.contiguous(), *lengths, 0.0, is_causal, *random),
            scale=scale,
        )
    else:
        many, grad, result = (_grouped(x, key) for x in (query, gradient, out))
        near, wide = (_wide(x).unsqueeze(2) for x in (key, value))
        shares = torch.exp(_scores(query, key, scale, is_causal, hidden) - _grouped(lse, key).unsqueeze(-1))
        slope = grad @ wide.transpose(-1, -2) - (grad * result).sum(-1, keepdim=True)
        slope = shares * slope * scale
        of_key, of_value = ((x.transpose(-1, -2) @ y).sum(2) for x, y in ((slope, many), (shares, grad)))
        grads = (slope @ near).flatten(1, 2), of_key, of_value
    of_query, of_key, of_value = grads
    return of_query[..., : query.size(-1)], of_key[..., : key.size(-1)], of_value[..., : value.size(-1)]


def sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which results and gradients of a tensor's dtype are summed: fp32, or fp64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def finite(lse: torch.Tensor) -> torch.Tensor:
    """Replaces values of queries that saw no key by 0, so that exponentials of them are 0 and not NaN."""
    return lse.masked_fill(torch.isinf(lse), 0.0)


def _kernel_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, has_mask: bool
) -> Literal["cpu", "flash", "small"]:
    """Returns what computes a block: one of torch's fused kernels, or small operations."""
    if query.device.type == "cpu":
        return "cpu"
    if query.device.type == "meta":  # of a plan
        return "flash" if query.itemsize == 2 and not has_mask else "small"
    if query.device.type != "cuda" or has_mask:
        return "small"
    query, key, value = _padded(query, key, value, multiple=8)
    params = SDPAParams(query, key, value, None, 0.0, False, True)
    return "flash" if can_use_flash_attention(params) else "small"


def _padded(*tensors: torch.Tensor, multiple: int = 1) -> list[torch.Tensor]:
    """Widens tensors with zeros to one width, a multiple of ``multiple``, with the last axis contiguous in memory.

    Neither kernel takes another layout; that for CPUs computes wrong values of it.
    """
    width = -(-max(x.size(-1) for x in tensors) // multiple) * multiple
    wide = (functional.pad(x, (0, width - x.size(-1))) if x.size(-1) < width else x for x in tensors)
    return [x if x.stride(-1) == 1 else x.contiguous() for x in wide]


def _added(hidden: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Returns the mask that the kernel for CPUs adds to scores."""
    return None if hidden is None else query.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(sum_dtype(x))


def _grouped(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Returns ``[batch, heads, ...]`` in ``sum_dtype`` as ``[batch, key heads, heads per key head, ...]``."""
    return _wide(x).unflatten(1, (key.size(1), -1))


def _scores(
    query: torch.Tensor, key: torch.Tensor, scale: float, is_causal: bool, hidden: torch.Tensor | None
) -> torch.Tensor:
    scores = (_grouped(query, key) @ _wide(key).unsqueeze(2).transpose(-1, -2)) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
    elif hidden is not None:
        hidden = hidden.unsqueeze(2)
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))
