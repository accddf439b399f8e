"""Rounding values to few bits, with the gradient passed straight through.

A weight is divided into groups of equal length, each with a scale and an offset of its own: ``value = code * scale +
offset`` with integer codes. At 3 bits and more codes are the nearest ones (ZeroQuant, arXiv 2206.01861); 2 bits are
ternary (TWN, arXiv 1605.04711), 1 bit is the sign (BWN, arXiv 1603.05279; zero counts as positive, since a bit has two
values), as in XTC (arXiv 2206.01859).

Pruning masks determine which weights, rows, heads or channels are kept. ``l1`` keeps the largest ones at installation;
its mask does not change afterwards. ``topk`` keeps those with the largest scores, which are trained with the rest
(movement pruning, arXiv 2005.07683): the gradient of the mask is passed on to the scores.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

TERNARY_THRESHOLD = 0.7  # times the mean of absolute values


class RoundedGroups(NamedTuple):
    """Groups of values after rounding."""

    codes: torch.Tensor  # integers in fp32, ``[groups, values of a group]``
    scale: torch.Tensor  # ``[groups, 1]``, fp32
    offset: torch.Tensor  # ``[groups, 1]``, fp32; zeros if rounding is symmetric
    least: int  # the smallest code that can occur

    def values(self) -> torch.Tensor:
        """Returns the rounded values, ``[groups, values of a group]`` in fp32."""
        return self.codes * self.scale + self.offset


def round_groups(
    groups: torch.Tensor, bits: int, *, symmetric: bool = True, generator: torch.Generator | None = None
) -> RoundedGroups:
    """Rounds each row of ``groups``, ``[groups, values]`` of floating dtype, to codes of this many bits.

    A scale of zero is replaced by 1, so a row of zeros stays zero; with asymmetric rounding a row of equal values stays
    unchanged.

    Args:
        bits: Bits of a code. Below 3, ``symmetric`` and ``generator`` are ignored.
        symmetric: Around zero: ``scale = 2 max|w| / 2^bits``, and the largest positive value is clamped by one step;
            otherwise between the least and the largest value, ``scale = (max - min) / 2^bits``.
        generator: Draws the noise of stochastic rounding, uniform in (-0.5, 0.5) of a step; None: rounds to nearest.
    """
    values = groups.float()
    if bits < 3:
        return _signs(values, ternary=bits == 2)
    levels = 2**bits
    if symmetric:
        scale = 2 * values.abs().amax(1, keepdim=True) / levels
        scale = torch.where(scale == 0, 1.0, scale)
        offset, low, high = torch.zeros_like(scale), -levels // 2, levels // 2 - 1
    else:
        least, most = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        width = (most - least) / levels
        scale = torch.where(width == 0, 1.0, width)
        offset = torch.where(width == 0, least, (least / scale).round() * scale)
        low, high = 0, levels - 1
    steps = (values - offset) / scale
    if generator is not None:
        noise = torch.rand(steps.shape, generator=generator, device=steps.device, dtype=steps.dtype)
        steps = steps + noise - 0.5
    return RoundedGroups(steps.round().clamp(low, high), scale, offset, low)


def _signs(values: torch.Tensor, *, ternary: bool) -> RoundedGroups:
    """Rounds to one magnitude per group: with zeros below a threshold (2 bits), or without (1 bit)."""
    size = values.abs()
    mean = size.mean(1, keepdim=True)
    if ternary:
        is_large = size > TERNARY_THRESHOLD * mean
        scale = (size * is_large).sum(1, keepdim=True) / is_large.sum(1, keepdim=True).clamp(min=1)
        codes = values.sign() * is_large
    else:
        scale, codes = mean, torch.where(values < 0, -1.0, 1.0)
    return RoundedGroups(codes, scale, torch.zeros_like(scale), -1)


class _StraightThroughEstimator(torch.autograd.Function):
    """Returns ``changed`` in forward; passes the gradient to ``original`` in backward."""

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
        return changed.view_as(changed)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def straight_through(original: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """Returns ``changed``, whose gradients go to ``original`` (straight-through estimator). Equal shapes."""
    return _StraightThroughEstimator.apply(original, changed.detach())  # type: ignore[no-untyped-call]


def kept_count(total: int, share: float) -> int:
    """Returns how many of ``total`` are kept: ``share * total`` rounded up."""
    # A share such as 0.7 of 10 is 7.000000000000001 in floating point.
    return min(total, math.ceil(share * total - 1e-9))


def largest(values: torch.Tensor, share: float) -> torch.Tensor:
    """Returns a mask, True for the ``kept_count`` largest of values of any shape; ``share`` is in (0, 1]."""
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
    """Returns the absolute sums of ``weight`` (``[out, in, ...]``) that ``l1`` compares.

    Args:
        kind: ``sparse`` (single weights), ``row`` and ``channel`` (along the first dimension) or ``head`` (columns, in
            ``heads`` equal blocks).
    """
    size = weight.detach().abs().float()
    if kind == "sparse":
        return size
    if kind == "head":
        assert heads is not None
        return size.view(size.shape[0], heads, -1).sum((0, 2))
    return size.flatten(1).sum(1)
