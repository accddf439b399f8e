"""Masks of pruning: which weights, rows, heads or channels are kept.

``l1`` keeps what is largest when the technique is installed, for good. ``topk`` keeps what has the largest scores,
which are trained with the rest (movement pruning, arXiv 2005.07683): the gradient of the mask is that of the scores.
"""

from __future__ import annotations

import math

import torch

from deepspeed.compression.rounding import straight_through


def kept_count(total: int, share: float) -> int:
    """Returns how many of ``total`` are kept: at least the share."""
    # A share such as 0.7 of 10 is 7.000000000000001 in floating point.
    return min(total, math.ceil(share * total - 1e-9))


def largest(values: torch.Tensor, share: float) -> torch.Tensor:
    """True for the largest values; of equal ones as many as are wanted, so that the count is exact.

    Args:
        values: Any shape.
        share: Of the values that are kept, in (0, 1].
    """
    flat = values.detach().flatten()
    mask = torch.zeros(flat.shape, dtype=torch.bool, device=flat.device)
    mask[flat.topk(kept_count(flat.numel(), share), sorted=False).indices] = True
    return mask.view(values.shape)


def learned(scores: torch.Tensor, share: float) -> torch.Tensor:
    """Returns 1 for the largest scores and 0 for the others, in the shape and dtype of ``scores``.

    Its gradient is passed on to the scores unchanged (straight-through).
    """
    return straight_through(scores, largest(scores, share).to(scores.dtype))


def norms(weight: torch.Tensor, kind: str, heads: int | None) -> torch.Tensor:
    """Returns what ``l1`` compares.

    Args:
        weight: ``[out, in, ...]``.
        kind: ``sparse`` (single weights), ``row`` and ``channel`` (along the first dimension) or ``head`` (columns, in
            ``heads`` equal blocks).
        heads: Number of heads.
    """
    size = weight.detach().abs().float()
    if kind == "sparse":
        return size
    if kind == "head":
        assert heads is not None
        return size.view(size.shape[0], heads, -1).sum((0, 2))
    return size.flatten(1).sum(1)
