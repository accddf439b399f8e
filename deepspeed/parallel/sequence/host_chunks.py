"""Causal attention of one chunk of queries after another, over keys and values that wait in host memory.

The keys and values of a chunk go to the host as an operation of the graph, so their gradients are summed there too; on
the device there is one chunk of queries and two of keys and values at a time (FPDT, arXiv 2408.16978).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from deepspeed.parallel.sequence.online import Rows, Rule, Slopes, Tokens, grouped


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, in memory that the device reads fast where there is such; differentiable."""
    if tensor.device.type == "cpu":
        return tensor
    moved: torch.Tensor = _ToHost.apply(tensor)
    return moved


def home(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a device's tensor in host memory; one that is there as it is."""
    if tensor.device.type == "cpu":
        return tensor
    kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return kept.copy_(tensor)


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.device = tensor.device
        return home(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        return gradients[0].to(ctx.device)


def attend_to_chunks(
    query: torch.Tensor, start: int, chunks: Sequence[tuple[torch.Tensor, torch.Tensor]], rule: Rule
) -> torch.Tensor:
    """What a chunk of queries gets from keys and values, of which there is a chunk at a time on the device.

    Args:
        query: ``[batch, heads, tokens, width]``.
        start: Place of its first token in the sequence.
        chunks: ``(key, value)`` of the sequence from its beginning, each ``[batch, key heads, tokens, width]``, on any
            device.
        rule: Who sees whom.

    Returns:
        As ``query``, with the width of the values.
    """
    parts = [tensor for pair in chunks for tensor in pair]
    out: torch.Tensor = _OfChunks.apply(query, start, rule, *parts)
    return out


class _OfChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, start: int, rule: Rule, *parts: torch.Tensor) -> torch.Tensor:
        many = grouped(query, parts[0].size(1))
        rows = Rows.of(many, parts[1].size(-1))
        mine = _places(start, query)
        for key, value, tokens in _fetched(parts, query.device):
            rows.see(many, key, value, mine, tokens, rule)
        out = rows.out.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(home(query) if parts[0].device != query.device else query, out, rows.lse, *parts)
        ctx.arguments = start, rule
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        query, out, lse, *parts = ctx.saved_tensors
        start, rule = ctx.arguments
        query, heads = query.to(out.device), parts[0].size(1)
        many, gradient = grouped(query, heads), grouped(gradients[0].float(), heads)
        delta = (gradient * grouped(out.float(), heads)).sum(-1)
        slopes = Slopes(many, gradient, lse, delta, torch.zeros_like(many, dtype=torch.float32))
        mine, found = _places(start, query), []
        for key, value, tokens in _fetched(parts, out.device):
            sums = [torch.zeros_like(part, dtype=torch.float32) for part in (key, value)]
            slopes.see(key, value, sums[0], sums[1], mine, tokens, rule)
            found += [
                home(part.to(key.dtype)) if parts[0].device.type == "cpu" else part.to(key.dtype) for part in sums
            ]
        return slopes.of_query.flatten(1, 2).to(query.dtype), None, None, *found


def _places(start: int, tensor: torch.Tensor) -> Tokens:
    return Tokens(torch.arange(start, start + tensor.size(2)))


def _fetched(
    parts: Sequence[torch.Tensor], device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor, Tokens]]:
    """Chunk after chunk on ``device`` with its places; the next one is asked for before one is used."""

    def pair(number: int) -> list[torch.Tensor]:
        return [tensor.to(device, non_blocking=True) for tensor in parts[2 * number : 2 * number + 2]]

    count, start = len(parts) // 2, 0
    coming = pair(0)
    for number in range(count):
        key, value = coming
        if number + 1 < count:
            coming = pair(number + 1)
        yield key, value, _places(start, key)
        start += key.size(2)
