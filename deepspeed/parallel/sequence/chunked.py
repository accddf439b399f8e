"""Attention in chunks, with keys and values in host memory (FPDT, arXiv 2408.16978)."""

from __future__ import annotations

import math
from typing import Any

import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.host_chunks import HostChunks, in_turn
from deepspeed.parallel.sequence.online import MaskRule, Rows, Slopes, Tokens, grouped


def chunked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    chunk_size: int = 65536,
    offload: bool = True,
    is_causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Computes attention of whole sequences; may be the local attention of ``DistributedAttention``.

    Keys and values are kept in host memory. One chunk at a time is on the device, while the next one is being copied.
    The result is as ``query``, with the width of ``value``.

    Args:
        query: ``[batch, heads, tokens, width]``.
        key: ``[batch, key heads, tokens, width]``; heads are a multiple of key heads.
        value: As ``key``.
        chunk_size: Tokens of a chunk.
        offload: False: keys and values stay on the device; only the computation is in chunks.
        is_causal: Tokens see none that come later.
        window: With ``is_causal``: tokens see themselves and the ``window - 1`` before them.
        scale: The scale of the scores; None: one over the root of the width.

    Raises:
        DeepSpeedConfigError: ``chunk_size`` is below 1.
    """
    if chunk_size < 1:
        raise DeepSpeedConfigError(f"chunked_attention(chunk_size={chunk_size}): expected at least 1 token")
    rule = MaskRule(is_causal, window, 1 / math.sqrt(query.size(-1)) if scale is None else scale)
    out: torch.Tensor = _ChunkedAttention.apply(query, key, value, rule, chunk_size, offload)
    return out


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: MaskRule,
        chunk_size: int,
        offload: bool,
    ) -> torch.Tensor:
        many = grouped(query, key.size(1))
        rows, tokens = Rows.of(many, value.size(-1)), Tokens(torch.arange(query.size(2)))
        copies = HostChunks(query.device)
        kept: list[torch.Tensor] = []  # key and value of each chunk, alternating
        for start, stop in _token_ranges(key.size(2), chunk_size):
            near = [tensor[:, :, start:stop] for tensor in (key, value)]
            rows.see(many, near[0], near[1], tokens, tokens.cut(start, stop), rule)
            kept += [copies.put(part) for part in near] if offload else near
        out = rows.out.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, out, rows.lse, *kept)
        ctx.arguments = rule, chunk_size, copies
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        query, out, lse, *kept = ctx.saved_tensors
        rule, chunk_size, copies = ctx.arguments
        heads, tokens = kept[0].size(1), Tokens(torch.arange(query.size(2)))
        many, gradient = grouped(query, heads), grouped(gradients[0].float(), heads)
        delta = (gradient * grouped(out.float(), heads)).sum(-1)
        slopes = Slopes(many, gradient, lse, delta, torch.zeros_like(many, dtype=torch.float32))
        ranges = _token_ranges(query.size(2), chunk_size)
        found = [query.new_empty((*part.shape[:2], query.size(2), part.size(3)), dtype=part.dtype) for part in kept[:2]]
        chunks = [kept[number : number + 2] for number in range(0, len(kept), 2)]
        for (start, stop), near in zip(ranges, in_turn(chunks, copies), strict=True):
            sums = [torch.zeros_like(part, dtype=torch.float32) for part in near]
            slopes.see(near[0], near[1], sums[0], sums[1], tokens, tokens.cut(start, stop), rule)
            for whole, part in zip(found, sums, strict=True):
                whole[:, :, start:stop] = part
        return slopes.of_query.flatten(1, 2).to(query.dtype), *found, None, None, None


def _token_ranges(tokens: int, size: int) -> list[tuple[int, int]]:
    """Returns where chunks of ``size`` tokens begin and end; one empty chunk where there are no tokens."""
    return [(start, min(start + size, tokens)) for start in range(0, max(tokens, 1), size)]
