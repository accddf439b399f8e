"""Tensors that are sent one behind another, as one 1-D tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]
"""Any strides; their elements count one tensor after another, each in the order of its axes."""


def numel_of(tensors: Tensors) -> int:
    """Returns the number of elements of all tensors together."""
    return sum(tensor.numel() for tensor in tensors)


def in_place(tensors: Tensors, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns the 1-D view that holds all tensors, where they lie one behind another in memory.

    None where they do not.
    """
    filled = [tensor for tensor in tensors if tensor.numel()]
    end = filled[0].storage_offset() if filled else 0
    for tensor in filled:
        if not tensor.is_contiguous() or tensor.dtype != dtype or tensor.storage_offset() != end:
            return None
        end += tensor.numel()
    if len({tensor.untyped_storage()._cdata for tensor in filled}) != 1:
        return None
    return filled[0].as_strided((numel_of(filled),), (1,))


def write(tensors: Tensors, flat: torch.Tensor) -> None:
    """Copies ``tensors`` into ``flat``, which is as long as they and may be of another dtype."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if len(filled) == 1:
        flat.view(filled[0].shape).copy_(filled[0])
    elif filled and _are_rows(filled):
        torch.cat(filled, out=flat.view(-1, *filled[0].shape[1:]))
    elif filled:
        for tensor, part in zip(filled, flat.split([tensor.numel() for tensor in filled]), strict=True):
            part.view(tensor.shape).copy_(tensor)


def read(flat: torch.Tensor, tensors: Tensors) -> None:
    """Copies ``flat`` into ``tensors``, which together are as long."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    if len(filled) == 1:
        filled[0].copy_(flat.view(filled[0].shape))
    elif filled and _are_rows(filled):
        rows = flat.view(-1, *filled[0].shape[1:])
        torch.split_with_sizes_copy(rows, [len(tensor) for tensor in filled], out=filled)
    elif filled:
        parts = flat.split([tensor.numel() for tensor in filled])
        for tensor, part in zip(filled, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def copy(source: Tensors, target: Tensors) -> None:
    """Copies each tensor that is not empty to its like, in order."""
    filled = ([tensor for tensor in tensors if tensor.numel()] for tensors in (source, target))
    for tensor, place in zip(*filled, strict=True):
        place.copy_(tensor)


def _are_rows(tensors: Tensors) -> bool:
    return len({tensor.shape[1:] for tensor in tensors}) == 1 and all(tensor.dim() > 0 for tensor in tensors)
