"""Copying the gradients of a bucket into its flat buffer, with the squares for the norm taken on the way."""

from __future__ import annotations

import torch

from deepspeed.zero.gradient.destination import CHUNK
from deepspeed.zero.tiling.layout import BucketLayout
from deepspeed.zero.update.norm import Squares


def pack_and_square(
    layout: BucketLayout,
    flat: torch.Tensor,
    views: list[torch.Tensor],
    grads: dict[int, torch.Tensor],
    squares: Squares,
) -> None:
    """Copies stretch by stretch, and takes the squares of each while it is in the cache.

    Args:
        layout: Of the bucket.
        flat: 1-D, the whole buffer; where no gradient goes, it is zero already.
        views: Of every tile in it.
        grads: By index of the tile, in its shape.
        squares: Receives the squares of all of ``flat``.
    """
    if flat.device.type != "cpu":  # launches would cost more than a pass over device memory
        if grads:
            torch._foreach_copy_([views[index] for index in grads], list(grads.values()))
        squares.add(flat)
        return
    ends = (*layout.starts[1:], layout.numel)
    first = 0
    while first < len(ends):
        last = first
        while last + 1 < len(ends) and ends[last] - layout.starts[first] < CHUNK:
            last += 1
        start, stop = layout.starts[first], ends[last]
        inside = [index for index in range(first, last + 1) if index in grads]
        if inside == [first] and stop - start > CHUNK and grads[first].is_contiguous():
            _copy_in_chunks(flat[start:stop], grads[first].view(-1), squares)
        elif inside:
            torch._foreach_copy_([views[index] for index in inside], [grads[index] for index in inside])
            squares.add(flat[start:stop])
        first = last + 1


def _copy_in_chunks(target: torch.Tensor, source: torch.Tensor, squares: Squares) -> None:
    """A tile larger than the cache; ``target`` may end in padding."""
    for low in range(0, source.numel(), CHUNK):
        part = source[low : low + CHUNK]
        target[low : low + part.numel()].copy_(part)
        squares.add(target[low : low + CHUNK])
