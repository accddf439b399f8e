"""Context parallelism: keys and values go round the ranks, each of which keeps its queries (arXiv 2310.01889).

Heads set no limit to the number of ranks. In causal attention the rank with the first tokens would have little to do
and the one with the last ones much; so tokens are dealt in zigzag: of 2 n chunks rank r has chunks r and 2 n - 1 - r.
Where a rank's tokens are odd in number, even chunks are longer by one: every rank has one of each kind.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from deepspeed.comm.transports.packing import Pieces
from deepspeed.comm.transports.transport import Transport, Work
from deepspeed.comm.watch import backward_comm
from deepspeed.parallel.sequence.online import MaskRule, Rows, Slopes, Tokens, grouped
from deepspeed.parallel.sequence.wire import wire_of
from deepspeed.uncompiled import uncompiled


def zigzag(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks, of twice as many as there are ranks, that a rank has."""
    return rank, 2 * ranks - 1 - rank


@uncompiled
def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Any,
    *,
    documents: torch.Tensor | None = None,
    is_causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention over sequences of which each rank has consecutive tokens. Every rank of the group must call it.

    Exact: the softmax is put together from blocks in fp32. Per rank and direction it moves the keys and values of the
    other ranks, and, where causal, half of all tensors once for the zigzag order.

    Args:
        query: ``[batch, heads, this rank's tokens, width]``; equally many tokens on all ranks.
        key: ``[batch, key heads, this rank's tokens, width]``; heads are a multiple of key heads.
        value: As ``key``.
        group: Torch process group.
        documents: Number of the document of every token of whole sequences, ``[batch, tokens]``, -1 for tokens that see
            nothing; None: one.
        is_causal: Tokens see none that come later.
        window: With ``is_causal``: tokens see themselves and the ``window - 1`` before them.
        scale: Of the scores; None: one over the root of the width.

    Returns:
        As ``query``, with the width of ``value``.
    """
    wire = wire_of(group, query.device)
    rule = MaskRule(is_causal, window, 1 / math.sqrt(query.size(-1)) if scale is None else scale)
    deals = is_causal and wire.size > 1
    if deals:
        query, key, value = (_Dealt.apply(tensor, wire, False) for tensor in (query, key, value))
    out: torch.Tensor = _Ring.apply(query, key, value, wire, rule, deals, documents)
    return _Dealt.apply(out, wire, True) if deals else out  # type: ignore[no-any-return]


def tokens_of(rank: int, wire: Transport, tokens: int, deals: bool, documents: torch.Tensor | None) -> Tokens:
    """Returns which tokens a rank has inside the ring.

    Args:
        rank: The rank.
        wire: The ranks of the ring.
        tokens: How many tokens it has.
        deals: Whether ranks have zigzag chunks instead of consecutive tokens.
        documents: ``[batch, sequence]``, each token's document; None: all are one.
    """
    if deals:
        chunks = [_chunk(number, tokens) for number in zigzag(rank, wire.size)]
        places = torch.cat([torch.arange(start, start + length) for start, length in chunks])
    else:
        places = torch.arange(rank * tokens, rank * tokens + tokens)
    return Tokens(places, None if documents is None else documents.cpu()[:, places])


def _chunk(number: int, tokens: int) -> tuple[int, int]:
    """Where a chunk begins in the sequence, and how long it is; ``tokens`` are those of a rank, of two chunks."""
    first = -(-tokens // 2)
    return number // 2 * tokens + number % 2 * first, tokens - first if number % 2 else first


class _Dealt(torch.autograd.Function):
    """Consecutive tokens along axis 2 dealt in zigzag, or put back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, wire: Transport, back: bool) -> torch.Tensor:
        ctx.arguments = wire, back
        return _deal(x, wire, back)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        wire, back = ctx.arguments
        return _deal(gradients[0], wire, not back), None, None


def _deal(x: torch.Tensor, wire: Transport, back: bool) -> torch.Tensor:
    n = wire.size

    def place(chunk: int, dealt: bool) -> int:
        return min(chunk, 2 * n - 1 - chunk) if dealt else chunk // 2

    def chunks(rank: int, dealt: bool) -> tuple[int, int]:
        return zigzag(rank, n) if dealt else (2 * rank, 2 * rank + 1)

    def length(chunk: int) -> int:
        return _chunk(chunk, x.size(2))[1]

    def by_rank(tensor: torch.Tensor, dealt: bool) -> list[list[torch.Tensor]]:
        """The chunks of a tensor that is dealt or not, by the rank that has them where it is the other."""
        names = chunks(wire.rank, dealt)
        halves = dict(zip(names, tensor.split([length(chunk) for chunk in names], dim=2), strict=True))
        return [[halves[chunk] for chunk in sorted(names) if place(chunk, not dealt) == rank] for rank in range(n)]

    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    wire.exchange(by_rank(x, back), by_rank(out, not back), x, label="tokens in zigzag order (ring attention)").wait()
    return out


class _Turning:
    """Tensors on their way to the next rank, while those of the rank before come."""

    def __init__(self, wire: Transport, *tensors: torch.Tensor) -> None:
        numels = [tensor.numel() for tensor in tensors]
        parts = tensors[0].new_empty(sum(numels)).split(numels)
        self._arriving = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
        leaving: list[Pieces] = [()] * wire.size
        arriving: list[Pieces] = [()] * wire.size
        leaving[(wire.rank + 1) % wire.size], arriving[(wire.rank - 1) % wire.size] = tensors, self._arriving
        label = "keys and values on their way round (ring attention)"
        self._work: Work = wire.exchange(leaving, arriving, tensors[0], label=label)

    def arrived(self) -> list[torch.Tensor]:
        """Waits for them."""
        self._work.wait()
        return self._arriving


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        wire: Transport,
        rule: MaskRule,
        deals: bool,
        documents: torch.Tensor | None,
    ) -> torch.Tensor:
        if wire.size > 1 and any(ctx.needs_input_grad):
            backward_comm.note_anywhere()
        owned = [tokens_of(rank, wire, query.size(2), deals, documents) for rank in range(wire.size)]
        many = grouped(query, key.size(1))
        rows = Rows.of(many, value.size(-1))
        block = [key, value]
        for step in range(wire.size):
            turning = _Turning(wire, *block) if step + 1 < wire.size else None
            rows.see(many, block[0], block[1], owned[wire.rank], owned[wire.rank - step], rule)
            if turning is not None:
                block = turning.arrived()
        out = rows.out.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, rows.lse)
        ctx.arguments = wire, rule, owned
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        wire, rule, owned = ctx.arguments
        many, gradient = grouped(query, key.size(1)), grouped(gradients[0].float(), key.size(1))
        delta = (gradient * grouped(out.float(), key.size(1))).sum(-1)
        slopes = Slopes(many, gradient, lse, delta, torch.zeros_like(many, dtype=torch.float32))
        # A block's gradient travels with it, one step behind, and is home after all ranks have added to it.
        block = [key, value]
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in block]
        for step in range(wire.size):
            turning = _Turning(wire, *block) if step + 1 < wire.size else None
            slopes.see(block[0], block[1], sums[0], sums[1], owned[wire.rank], owned[wire.rank - step], rule)
            if turning is not None:
                block = turning.arrived()
            if wire.size > 1:
                sums = _Turning(wire, *sums).arrived()
        of_query = slopes.of_query.flatten(1, 2).to(query.dtype)
        return of_query, sums[0].to(key.dtype), sums[1].to(value.dtype), None, None, None, None
