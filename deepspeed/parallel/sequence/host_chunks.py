"""Attention chunk by chunk of queries, over keys and values in host memory.

Copying keys and values to the host is an autograd operation, so their gradients are summed there too. The device holds
one chunk of queries and two of keys and values at a time (FPDT, arXiv 2408.16978).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from deepspeed.offload.streams import CopyHandle, CopyStream
from deepspeed.parallel.sequence.block_kernels import sum_dtype
from deepspeed.parallel.sequence.online import MaskRule, Rows, Slopes, Tokens, add_at


class PrefetchedTensors:
    """Tensors of any shape that are being copied to the device."""

    def __init__(self, tensors: list[torch.Tensor], copies: Sequence[CopyHandle]) -> None:
        self._tensors, self._copies = tensors, copies

    def take(self) -> list[torch.Tensor]:
        """Returns the tensors; the current stream waits for their copies, the host does not."""
        for copy in self._copies:
            copy.wait()
        return self._tensors


class HostChunks:
    """Copies of a device's tensors in host memory, with one stream per direction of copy.

    Host memory comes from torch's pool of page-locked blocks, so memory is locked in the first pass only. If attention
    is computed on the host, nothing is copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = CopyStream(device), CopyStream(device)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy of ``tensor`` (any shape and dtype) in host memory.

        The copy may be passed to :meth:`fetch` at once. The host must not read it yet.
        """
        if tensor.device.type == "cpu":
            return tensor
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        self._down.copy(kept, tensor.detach().contiguous())
        return kept

    def settle(self) -> None:
        """Blocks until the host may read all tensors put so far."""
        self._down.wait_on_host()

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PrefetchedTensors:
        """Starts to copy tensors (any shapes) to the device, after all calls of :meth:`put`.

        Tensors that are on the device stay as they are.
        """
        found = [
            torch.empty_like(tensor, device=self._device) if tensor.device != self._device else tensor
            for tensor in tensors
        ]
        self._up.wait_for(self._down)
        pairs = [(there, tensor) for there, tensor in zip(found, tensors, strict=True) if there is not tensor]
        return PrefetchedTensors(found, [self._up.copy(there, tensor) for there, tensor in pairs])

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copies ``tensor`` (any shape) to host memory like :meth:`put`, and is differentiable."""
        if tensor.device.type == "cpu":
            return tensor
        moved: torch.Tensor = _ToHost.apply(tensor, self)
        return moved


class _ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, chunks: HostChunks) -> torch.Tensor:
        ctx.device = tensor.device
        return chunks.put(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        return gradients[0].to(ctx.device, non_blocking=True), None


def attend_to_chunks(
    query: torch.Tensor,
    start: int,
    chunks: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rule: MaskRule,
    copies: HostChunks,
    *,
    offload: bool = False,
) -> torch.Tensor:
    """Returns the attention of a chunk of queries; keys and values are on the device one chunk at a time.

    Args:
        query: ``[batch, heads, tokens, width]``, as the result, which has the width of the values.
        start: Position of its first token in the sequence.
        chunks: ``(key, value)`` of the sequence from its beginning, each ``[batch, key heads, tokens, width]``, on any
            device.
        copies: The object that has copied ``chunks`` to the host.
        offload: Save copies of ``chunks``, which are on the device, in host memory for backward.
    """
    parts = [tensor for pair in chunks for tensor in pair]
    out: torch.Tensor = _OfChunks.apply(query, start, rule, copies, offload, *parts)
    return out


class _OfChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        start: int,
        rule: MaskRule,
        copies: HostChunks,
        offload: bool,
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        rows, mine = Rows.of(query, parts[1].size(-1)), _tokens_from(start, query)
        kept: list[torch.Tensor] = []
        for key, value, tokens in _fetched(parts, copies):
            rows.see(key, value, mine, tokens, rule)
            kept += [copies.put(part) for part in (key, value)] if offload else ()
        out, lse = rows.result()
        is_on_host = parts[0].device != query.device
        ctx.save_for_backward(copies.put(query) if is_on_host else query, out, lse, *(kept or parts))
        ctx.arguments = start, rule, copies, is_on_host
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        query, out, lse, *parts = ctx.saved_tensors
        start, rule, copies, is_on_host = ctx.arguments
        (query,) = copies.fetch([query]).take()
        slopes, mine, found = Slopes(query, gradients[0], out, lse), _tokens_from(start, query), []
        for key, value, tokens in _fetched(parts, copies):
            sums = [torch.zeros_like(part, dtype=sum_dtype(part)) for part in (key, value)]
            for keys, some in slopes.see(key, value, mine, tokens, rule):
                add_at(keys, some, sums)
            found += [copies.put(part.to(key.dtype)) if is_on_host else part.to(key.dtype) for part in sums]
        if is_on_host:
            copies.settle()  # autograd adds them up on the host
        return slopes.of_query.to(query.dtype), None, None, None, None, *found


def _tokens_from(start: int, tensor: torch.Tensor) -> Tokens:
    return Tokens(torch.arange(start, start + tensor.size(2)))


def _fetched(parts: Sequence[torch.Tensor], copies: HostChunks) -> Iterator[tuple[torch.Tensor, torch.Tensor, Tokens]]:
    """Yields each chunk on the device with its positions, while the next one is being copied."""
    start = 0
    for key, value in in_turn([parts[number : number + 2] for number in range(0, len(parts), 2)], copies):
        yield key, value, _tokens_from(start, key)
        start += key.size(2)


def in_turn(chunks: Sequence[Sequence[torch.Tensor]], copies: HostChunks) -> Iterator[list[torch.Tensor]]:
    """Yields the tensors (any shapes) of one chunk after another on the device.

    The next chunk is fetched before one is used.
    """
    coming = copies.fetch(chunks[0])
    for number in range(len(chunks)):
        here = coming.take()
        if number + 1 < len(chunks):
            coming = copies.fetch(chunks[number + 1])
        yield here
