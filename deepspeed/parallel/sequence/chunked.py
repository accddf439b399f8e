"""Attention whose keys and values wait in host memory, chunk by chunk (FPDT, arXiv 2408.16978)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.host_chunks import home
from deepspeed.parallel.sequence.online import Rows, Rule, Slopes, Tokens, grouped


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
    """Attention of whole sequences; usable as the local attention of ``DistributedAttention``'s heads.

    Between forward and backward keys and values are in host memory, and on the device one chunk of them at a time,
    while the next one is on its way.

    Args:
        query: ``[batch, heads, tokens, width]``.
        key: ``[batch, key heads, tokens, width]``; heads are a multiple of key heads.
        value: As ``key``.
        chunk_size: Tokens of a chunk.
        offload: False: they stay on the device, and only the computation is in chunks.
        is_causal: Tokens see none that come later.
        window: With ``is_causal``: tokens see themselves and the ``window - 1`` before them.
        scale: Of the scores; None: one over the root of the width.

    Returns:
        As ``query``, with the width of ``value``.

    Raises:
        DeepSpeedConfigError: ``chunk_size`` is below 1.
    """
    if chunk_size < 1:
        raise DeepSpeedConfigError(f"chunked_attention(chunk_size={chunk_size}): expected at least 1 token")
    rule = Rule(is_causal, window, 1 / math.sqrt(query.size(-1)) if scale is None else scale)
    out: torch.Tensor = _Chunked.apply(query, key, value, rule, chunk_size, offload)
    return out


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: Rule,
        chunk_size: int,
        offload: bool,
    ) -> torch.Tensor:
        many = grouped(query, key.size(1))
        rows, tokens = Rows.of(many, value.size(-1)), Tokens(torch.arange(query.size(2)))
        kept = [home(tensor) if offload else tensor for tensor in (key, value)]
        for (start, stop), near in _chunks(kept, chunk_size, query.device):
            rows.see(many, near[0], near[1], tokens, tokens.cut(start, stop), rule)
        out = rows.out.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, *kept, out, rows.lse)
        ctx.arguments = rule, chunk_size
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        rule, chunk_size = ctx.arguments
        heads, tokens = key.size(1), Tokens(torch.arange(query.size(2)))
        many, gradient = grouped(query, heads), grouped(gradients[0].float(), heads)
        delta = (gradient * grouped(out.float(), heads)).sum(-1)
        slopes = Slopes(many, gradient, lse, delta, torch.zeros_like(many, dtype=torch.float32))
        found = [torch.empty(kept.shape, dtype=kept.dtype, device=query.device) for kept in (key, value)]
        for (start, stop), near in _chunks([key, value], chunk_size, query.device):
            sums = [torch.zeros_like(part, dtype=torch.float32) for part in near]
            slopes.see(near[0], near[1], sums[0], sums[1], tokens, tokens.cut(start, stop), rule)
            for whole, part in zip(found, sums, strict=True):
                whole[:, :, start:stop] = part
        return slopes.of_query.flatten(1, 2).to(query.dtype), *found, None, None, None


def _chunks(
    kept: list[torch.Tensor], size: int, device: torch.device
) -> Iterator[tuple[tuple[int, int], list[torch.Tensor]]]:
    """Chunk after chunk on ``device``; the next one is asked for before one is used."""
    tokens = kept[0].size(2)
    places = [(start, min(start + size, tokens)) for start in range(0, tokens, size)]

    def fetched(place: tuple[int, int]) -> list[torch.Tensor]:
        return [tensor[:, :, place[0] : place[1]].to(device, non_blocking=True) for tensor in kept]

    coming = fetched(places[0])
    for number, place in enumerate(places):
        near = coming
        if number + 1 < len(places):
            coming = fetched(places[number + 1])
        yield place, near
