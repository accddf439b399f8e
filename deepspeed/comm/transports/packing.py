"""Tensors that travel one behind another, as one 1-D tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Pieces = Sequence[torch.Tensor]
"""Any strides; their elements count one piece after another, each in the order of its axes."""


def numel_of(pieces: Pieces) -> int:
    """Elements of all pieces together."""
    return sum(piece.numel() for piece in pieces)


def in_place(pieces: Pieces, dtype: torch.dtype) -> torch.Tensor | None:
    """The 1-D view that holds all pieces, where they lie one behind another in memory; None where they do not."""
    filled = [piece for piece in pieces if piece.numel()]
    end = filled[0].storage_offset() if filled else 0
    for piece in filled:
        if not piece.is_contiguous() or piece.dtype != dtype or piece.storage_offset() != end:
            return None
        end += piece.numel()
    if len({piece.untyped_storage()._cdata for piece in filled}) != 1:
        return None
    return filled[0].as_strided((numel_of(filled),), (1,))


def write(pieces: Pieces, flat: torch.Tensor) -> None:
    """Copies ``pieces`` into ``flat``, which is as long as they and may be of another dtype."""
    filled = [piece for piece in pieces if piece.numel()]
    if len(filled) == 1:
        flat.view(filled[0].shape).copy_(filled[0])
    elif filled and _are_rows(filled):
        torch.cat(filled, out=flat.view(-1, *filled[0].shape[1:]))
    elif filled:
        for piece, part in zip(filled, flat.split([piece.numel() for piece in filled]), strict=True):
            part.view(piece.shape).copy_(piece)


def read(flat: torch.Tensor, pieces: Pieces) -> None:
    """Copies ``flat`` into ``pieces``, which together are as long."""
    filled = [piece for piece in pieces if piece.numel()]
    if len(filled) == 1:
        filled[0].copy_(flat.view(filled[0].shape))
    elif filled and _are_rows(filled):
        rows = flat.view(-1, *filled[0].shape[1:])
        torch.split_with_sizes_copy(rows, [len(piece) for piece in filled], out=filled)
    elif filled:
        parts = flat.split([piece.numel() for piece in filled])
        for piece, part in zip(filled, parts, strict=True):
            piece.copy_(part.view(piece.shape))


def copy(source: Pieces, target: Pieces) -> None:
    """Copies each piece that is not empty to its like, in order."""
    filled = ([piece for piece in pieces if piece.numel()] for pieces in (source, target))
    for piece, place in zip(*filled, strict=True):
        place.copy_(piece)


def _are_rows(pieces: Pieces) -> bool:
    return len({piece.shape[1:] for piece in pieces}) == 1 and pieces[0].dim() > 0
