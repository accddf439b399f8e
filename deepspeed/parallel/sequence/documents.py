"""Which tokens of a sequence see each other: documents that were packed into it, and padding.

A document ends where positions do not go on by one. Where there is a padding mask, that alone decides, as the models
themselves have it: no token sees hidden tokens. They see nothing either: their attention is 0, as the kernels have
it where a row of the mask hides everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PackedRow:
    """The tokens of one sequence, document after document.

    Attributes:
        lengths: Tokens of each document.
        order: Where the tokens of the documents lie, one document after the other; None: as they are numbered, and all
            tokens are in a document. Those that are in none see nothing.
    """

    lengths: tuple[int, ...]
    order: torch.Tensor | None = None


Documents = tuple[PackedRow, ...]
"""By sequence of the batch."""


def holds_one_sequence_per_rank(positions: torch.Tensor, visible: torch.Tensor, ranks: int) -> bool:
    """Returns whether the positions begin again at 0 in every rank's part: each rank was given its own whole sequences.

    Parts without visible tokens, and parts before which nothing is visible, do not contradict that: for them both
    readings give the same attention. Waits for the device.

    Args:
        positions: Position ids ``[batch or 1, tokens]`` of all parts, in the order of the ranks.
        visible: Padding mask ``[batch, tokens]``.
        ranks: Number of parts.
    """
    mask = visible.bool().cpu().unflatten(1, (ranks, -1))
    places = positions.cpu().expand(visible.size(0), -1).unflatten(1, (ranks, -1))
    first_visible = mask.int().argmax(-1, keepdim=True)
    begins = (places[..., 0] == 0) | (places.gather(-1, first_visible)[..., 0] == 0)
    return bool((begins | ~mask.any(-1))[:, 1:].all())


def documents_of(positions: torch.Tensor | None, visible: torch.Tensor | None, parts: int = 1) -> Documents | None:
    """Finds the documents of whole sequences; None where each is one document. Waits for the device.

    Args:
        positions: Position ids ``[batch, tokens]``.
        visible: Padding mask ``[batch, tokens]``, True (or 1) for tokens; where it is there, positions do not count.
        parts: With ``visible``: equal parts of the tokens that do not see each other.
    """
    if visible is not None:
        visible = visible.bool().cpu()
        if parts == 1 and bool(visible.all()):
            return None
        return tuple(_of_mask(row, parts) for row in visible)
    if positions is None:
        return None
    begins = torch.diff(positions, dim=-1) != 1
    if not bool(begins.any()):
        return None
    return tuple(PackedRow(_lengths(row)) for row in begins.cpu())


def _lengths(begins: torch.Tensor) -> tuple[int, ...]:
    """Lengths of documents from whether each token but the first begins one."""
    starts = [0, *(1 + begins.nonzero().flatten()).tolist(), begins.numel() + 1]
    return tuple(end - start for start, end in zip(starts, starts[1:], strict=False))


def _of_mask(visible: torch.Tensor, parts: int) -> PackedRow:
    counts = visible.unflatten(0, (parts, -1)).sum(-1).tolist()
    return PackedRow(tuple(count for count in counts if count), visible.nonzero().flatten())


def document_numbers(
    positions: torch.Tensor | None, visible: torch.Tensor | None, parts: int = 1
) -> torch.Tensor | None:
    """The same as a number per token, ``[batch, tokens]`` on the host; None where each sequence is one document.

    Tokens that are in no document have -1.
    """
    if visible is not None:
        visible = visible.bool().cpu()
        if parts == 1 and bool(visible.all()):
            return None
        numbers = torch.arange(parts).repeat_interleave(visible.size(1) // parts)
        return numbers.where(visible, -1)
    if positions is None:
        return None
    begins = torch.diff(positions, dim=-1).cpu() != 1
    if not bool(begins.any()):
        return None
    return torch.nn.functional.pad(begins.long().cumsum(-1), (1, 0))
