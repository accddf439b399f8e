"""Stores rounded weights as codes: finds the smallest format that represents a weight exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepspeed.compression.rounding import RoundedGroups
from deepspeed.linear.quantized_linear import QuantizedConv2d, QuantizedEmbedding, QuantizedLinear
from deepspeed.ops.packed_linear import GroupCodes, PackedFormat, packed_format
from deepspeed.ops.packed_linear.formats import GROUP_SIZES, Int4Groups, Int8Rows

_EXACT = 1e-5  # error allowed for fp32 arithmetic, relative to the largest value
WIDEST = 8  # bits of a code
_KERNEL_IS_WORTH = 1.25  # a format with a kernel may take this many times the bytes


@dataclass(frozen=True)
class QuantizationLevels:
    """The values that a rounded weight can take."""

    bits: int  # bits of a code
    least: int  # the smallest code
    scale: torch.Tensor  # ``[out, groups of a row]``, fp32
    offset: torch.Tensor  # like ``scale``; zeros if rounding was symmetric
    symmetric: bool  # whether rounding was symmetric

    @classmethod
    def of(
        cls, rounded: RoundedGroups, bits: int, shape: tuple[int, int], symmetric: bool
    ) -> QuantizationLevels | None:
        """Returns the levels of a weight ``[out, in]``; None if a group contains a part of several rows."""
        rows, columns = shape
        length = rows * columns // len(rounded.scale)
        if length % columns == 0:
            scale, offset = (each.repeat_interleave(length // columns, 0) for each in (rounded.scale, rounded.offset))
        elif columns % length == 0:
            scale, offset = rounded.scale.view(rows, -1), rounded.offset.view(rows, -1)
        else:
            return None
        scale = torch.where(scale == 0, 1.0, scale)  # signs of a group of zeros
        return cls(bits, rounded.least, scale.contiguous(), offset.contiguous(), symmetric)

    def kept(self, rows: torch.Tensor | None, columns: torch.Tensor | None) -> QuantizationLevels | None:
        """Returns the levels of these rows and columns (1-D; None: all); None if groups would differ in length."""
        if columns is not None and self.scale.shape[1] > 1:
            return None
        if rows is None:
            return self
        return replace(self, scale=self.scale[rows], offset=self.offset[rows])


class Packed:
    """Encodes one weight for all layers that use it. ``format`` is None if no format represents it exactly.

    Args:
        weight: ``[out, in]``, the rounded values.
        by_rows: Whether single rows must be readable, as an embedding needs.
    """

    def __init__(self, weight: torch.Tensor, levels: QuantizationLevels, *, by_rows: bool) -> None:
        self.format: PackedFormat | None = None
        for format_, scale, offset in _candidates(weight, levels, by_rows):
            codes, scales = format_.encode(weight, scale, offset)
            found = format_.unpack(codes, scales, len(weight), torch.float32)
            # Values of a 16-bit weight were rounded to 16 bits; codes represent them before that.
            lost = _EXACT if weight.dtype == torch.float32 else torch.finfo(weight.dtype).eps
            if (found - weight.float()).abs().max() <= lost * weight.abs().max():
                self.format = format_
                self.codes = nn.Parameter(codes, requires_grad=False)
                self.scales = nn.Parameter(scales, requires_grad=False)
                return

    def layer(self, like: Any, kind: str) -> nn.Module:
        """Returns the layer that replaces ``like``, a layer of this kind (see ``settings.KINDS``)."""
        assert self.format is not None
        if kind == "conv2d":
            return QuantizedConv2d(like, self.codes, self.scales, self.format)
        sizes, dtype = tuple(like.weight.shape), like.weight.dtype
        if kind == "embedding":
            return QuantizedEmbedding(self.codes, self.scales, self.format, sizes, dtype)
        sizes = sizes[::-1] if kind == "conv1d" else sizes
        return QuantizedLinear.with_codes(self.codes, self.scales, self.format, sizes, like.bias, dtype)


class _Int8(Int8Rows):
    """``Int8Rows`` for a weight whose scales are given: ``encode`` keeps them in fp32."""

    def encode(
        self, weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (weight.float() / scale).round_().clamp_(-128, 127).to(torch.int8), scale.flatten().contiguous()


def _candidates(weight: torch.Tensor, levels: QuantizationLevels, by_rows: bool) -> Any:
    """Yields ``(format, scale, offset)`` for each format that may represent a weight, the best first."""
    columns, groups = weight.shape[1], levels.scale.shape[1]
    scale, offset = levels.scale, levels.offset
    if levels.bits == 1:  # plus and minus; if pruning left zeros, the 2-bit format below fits
        yield GroupCodes(1, columns, groups=groups), 2 * scale, -scale
    if levels.bits <= 2:
        yield GroupCodes(2, columns, groups=groups, least=-1, has_offset=False), scale, torch.zeros_like(scale)
        return
    bits = 4 if levels.bits <= 4 else 8
    codes = GroupCodes(bits, columns, groups=groups, least=levels.least, has_offset=not levels.symmetric)
    if bits == 4 and not by_rows and (int4 := _int4(weight, groups, codes)) is not None:
        times = columns // groups // int4.group_size
        middle = offset if levels.symmetric else offset + 8 * scale
        yield int4, scale.repeat_interleave(times, 1), middle.repeat_interleave(times, 1)
    if bits == 8 and levels.symmetric and groups == 1:
        yield _Int8(), scale, offset
    yield codes, scale, offset


def _int4(weight: torch.Tensor, groups: int, other: PackedFormat) -> Int4Groups | None:
    """Returns the int4 format, which has a kernel; None if its groups do not fit or its padding costs too much."""
    rows, columns = weight.shape
    for size in reversed(GROUP_SIZES):
        if (columns // groups) % size == 0:
            found = packed_format(4, size)
            assert isinstance(found, Int4Groups)
            is_small = _bytes_of(found, rows, columns) <= _KERNEL_IS_WORTH * _bytes_of(other, rows, columns)
            return found if is_small else None
    return None


def _bytes_of(how: PackedFormat, rows: int, columns: int) -> int:
    codes, scales = how.shapes(rows, columns)
    return math.prod(codes) + 4 * math.prod(scales)
