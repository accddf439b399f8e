"""Ring attention: keys and values are passed around the ranks, queries stay (arXiv 2310.01889).

The number of ranks is not limited by that of heads. In causal attention later tokens need more work; to balance it,
tokens lie in zigzag order: of 2 n chunks rank r has chunks r and 2 n - 1 - r. If the number of a rank's tokens is odd,
even chunks are longer by one: every rank has an even and an odd chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.comm.job import backward_comm
from deepspeed.comm.transports.differentiable import all_to_all
from deepspeed.comm.transports.packing import Tensors
from deepspeed.comm.transports.transport import Transport, Work
from deepspeed.parallel.sequence.block_kernels import sum_dtype
from deepspeed.parallel.sequence.exchange import transport_of
from deepspeed.parallel.sequence.online import MaskRule, Rows, Slopes, Tokens, add_at
from deepspeed.uncompiled import uncompiled


def zigzag(rank: int, ranks: int) -> tuple[int, int]:
    """Returns the numbers of a rank's two chunks, of ``2 * ranks``."""
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
    """Computes attention over sequences that are divided over ranks by consecutive tokens. Every rank must call it.

    Exact: blocks of keys are computed by torch's fused attention, and combined in fp32. Per rank and direction it moves
    the keys and values of the other ranks, and, where causal, half of all tensors once for the zigzag order. The result
    is as ``query``, with the width of ``value``.

    Args:
        query: ``[batch, heads, this rank's tokens, width]``; equally many tokens on all ranks.
        key: ``[batch, key heads, this rank's tokens, width]``; heads are a multiple of key heads.
        value: As ``key``.
        documents: Document number of every token of whole sequences, ``[batch, tokens]``, -1 for tokens that see
            nothing; None: one document.
        is_causal: Tokens see no later ones.
        window: With ``is_causal``: tokens see themselves and the ``window - 1`` before them.
        scale: The scale of the scores; None: one over the root of the width.
    """
    transport = transport_of(group, query.device)
    rule = MaskRule(is_causal, window, 1 / math.sqrt(query.size(-1)) if scale is None else scale)
    key, value = key.to(query.dtype), value.to(query.dtype)
    in_zigzag = is_causal and transport.size > 1
    if in_zigzag:
        query, key, value = (all_to_all(_ZigzagExchange(transport), tensor) for tensor in (query, key, value))
    out: torch.Tensor = _Ring.apply(query, key, value, transport, rule, in_zigzag, documents)
    return all_to_all(_ZigzagExchange(transport, back=True), out) if in_zigzag else out  # type: ignore[no-any-return]


def tokens_of(rank: int, transport: Transport, tokens: int, in_zigzag: bool, documents: torch.Tensor | None) -> Tokens:
    """Returns the tokens that a rank has inside the ring: consecutive ones, or zigzag chunks.

    ``documents`` are ``[batch, sequence]``, each token's document; None: all are one.
    """
    if in_zigzag:
        chunks = [_chunk(number, tokens) for number in zigzag(rank, transport.size)]
        positions = torch.cat([torch.arange(start, start + length) for start, length in chunks])
    else:
        positions = torch.arange(rank * tokens, rank * tokens + tokens)
    return Tokens(positions, None if documents is None else documents.cpu()[:, positions])


def _chunk(number: int, tokens: int) -> tuple[int, int]:
    """Returns start and length of a chunk in the sequence; ``tokens``: tokens per rank (two chunks)."""
    first = -(-tokens // 2)
    return number // 2 * tokens + number % 2 * first, tokens - first if number % 2 else first


@dataclass(frozen=True)
class _ZigzagExchange:
    """Exchanges consecutive tokens along axis 2 for zigzag chunks, or with ``back`` in reverse."""

    transport: Transport
    back: bool = False

    def run(self, *values: torch.Tensor) -> torch.Tensor:
        return _exchange_chunks(values[0], self.transport, self.back)

    def reverse(self) -> _ZigzagExchange:
        return _ZigzagExchange(self.transport, not self.back)


def _exchange_chunks(x: torch.Tensor, transport: Transport, back: bool) -> torch.Tensor:
    n = transport.size

    def place(chunk: int, in_zigzag: bool) -> int:
        return min(chunk, 2 * n - 1 - chunk) if in_zigzag else chunk // 2

    def chunks(rank: int, in_zigzag: bool) -> tuple[int, int]:
        return zigzag(rank, n) if in_zigzag else (2 * rank, 2 * rank + 1)

    def length(chunk: int) -> int:
        return _chunk(chunk, x.size(2))[1]

    def by_rank(tensor: torch.Tensor, in_zigzag: bool) -> list[list[torch.Tensor]]:
        """Returns the chunks of a tensor in one order, by the rank that has them in the other order."""
        names = chunks(transport.rank, in_zigzag)
        halves = dict(zip(names, tensor.split([length(chunk) for chunk in names], dim=2), strict=True))
        return [[halves[chunk] for chunk in sorted(names) if place(chunk, not in_zigzag) == rank] for rank in range(n)]

    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    transport.exchange(
        by_rank(x, back), by_rank(out, not back), x, label="tokens in zigzag order (ring attention)"
    ).wait()
    return out


class _RingTransfer:
    """A transfer of tensors to the next rank and from the previous one."""

    def __init__(self, transport: Transport, *tensors: torch.Tensor) -> None:
        self._arriving = _like_flat(tensors, tensors[0].dtype)
        leaving: list[Tensors] = [()] * transport.size
        arriving: list[Tensors] = [()] * transport.size
        leaving[(transport.rank + 1) % transport.size], arriving[(transport.rank - 1) % transport.size] = (
            tensors,
            self._arriving,
        )
        label = "the exchange of keys and values (ring attention)"
        self._work: Work | None = transport.exchange(leaving, arriving, tensors[0], label=label)

    def arrived(self) -> list[torch.Tensor]:
        """Waits for the tensors of the previous rank at the first call, and returns them."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._arriving


def _like_flat(tensors: Tensors, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns memory for tensors of these shapes, one behind another, so that they are sent without a copy."""
    numels = [tensor.numel() for tensor in tensors]
    parts = tensors[0].new_empty(sum(numels), dtype=dtype).split(numels)
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        transport: Transport,
        rule: MaskRule,
        in_zigzag: bool,
        documents: torch.Tensor | None,
    ) -> torch.Tensor:
        if transport.size > 1 and any(ctx.needs_input_grad):
            backward_comm.note_anywhere()
        owned = [tokens_of(rank, transport, query.size(2), in_zigzag, documents) for rank in range(transport.size)]
        rows = Rows.of(query, value.size(-1))
        block = [key, value]
        for step in range(transport.size):
            transfer = _RingTransfer(transport, *block) if step + 1 < transport.size else None
            rows.see(block[0], block[1], owned[transport.rank], owned[transport.rank - step], rule)
            if transfer is not None:
                block = transfer.arrived()
        out, lse = rows.result()
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.arguments = transport, rule, owned
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        transport, rule, owned = ctx.arguments
        slopes = Slopes(query, gradients[0], out, lse)
        # The sums of a block's gradients follow the block, one step later, and return to its rank after all ranks have
        # added to them. They travel while the gradients of the next block are computed.
        block = [key, value]
        sums = _like_flat([key, value], sum_dtype(key))
        for part in sums:
            part.zero_()
        coming: _RingTransfer | None = None
        for step in range(transport.size):
            transfer = _RingTransfer(transport, *block) if step + 1 < transport.size else None
            pairs = block[0], block[1], owned[transport.rank], owned[transport.rank - step]
            for keys, found in slopes.see(*pairs, rule):
                sums = coming.arrived() if coming is not None else sums
                add_at(keys, found, sums)
            if transport.size > 1:
                sums = coming.arrived() if coming is not None else sums
                coming = _RingTransfer(transport, *sums)
            if transfer is not None:
                block = transfer.arrived()
        if coming is not None:
            sums = coming.arrived()
        of_query = slopes.of_query.to(query.dtype)
        return of_query, sums[0].to(key.dtype), sums[1].to(value.dtype), None, None, None, None
