"""Formats that store the weight of a linear layer in few bits.

A weight, ``[out_features, in_features]``, becomes two tensors: ``codes`` (integers) and ``scales``. The scales are
bfloat16 if ``pack`` rounds a weight, and fp32 if ``encode`` is given the scales of a weight that was trained with
rounding. Both are plain tensors that can be parameters, buffers or saved; their layout is the same on all machines.

- Eight bits (:class:`Int8Rows`): symmetric, a scale per output feature.
- Four bits (:class:`Int4Groups`): a scale and an offset per group of input features. On all machines, codes have the
  layout of torch's kernel for CPUs with AVX-512: blocks of 64 output features, in which a byte holds the codes of
  features j (low half) and j + 32 (high half) at one input feature. If a machine's kernel needs another layout
  (:func:`_kernel_reads_it` tests it once), the weight is unpacked instead.
- One to eight bits (:class:`GroupCodes`), for weights that were trained with rounding: consecutive codes and a scale
  for each group. It represents the trained values exactly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from typing_extensions import override


class Columns(NamedTuple):
    """A few output features of an unpacked weight."""

    start: int  # the first of them
    stop: int  # one after the last
    # ``[in_features, stop - start]``, in the requested dtype. Its memory is reused for the next columns.
    weight: torch.Tensor
    # ``[stop - start]``, by which the product with ``weight`` must be multiplied; None: not at all
    scale: torch.Tensor | None


class PackedFormat(ABC):
    """A format that stores a weight in few bits."""

    bits: int  # bits of a code
    # number of rows of bfloat16 activations up to which torch's packed kernel on the CPU is faster than unpacking the
    # weight block by block (measured on a CPU with AVX-512, 4096 x 4096)
    few_rows: int

    @abstractmethod
    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of codes and scales."""

    @abstractmethod
    def refusal(self, in_features: int) -> str | None:
        """Returns why a weight with this many input features cannot be packed; None if it can."""

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds ``weight`` (``[out, in]``, finite, any floating dtype) to codes and scales on its device.

        Their shapes are those of :meth:`shapes`.
        """

    @abstractmethod
    def columns(
        self, codes: torch.Tensor, scales: torch.Tensor, out_features: int, dtype: torch.dtype
    ) -> Iterator[Columns]:
        """Yields the weight in blocks of output features, so that it is never unpacked as a whole.

        Each block is ``[in, features]`` in ``dtype``.
        """

    def _width_of(self, codes: torch.Tensor) -> int:
        return codes.shape[1]

    @abstractmethod
    def kernel(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
        """Returns the product by torch's packed kernel: ``[rows, in] -> [rows, out or more]``.

        Returns None if there is no kernel for this device, dtype or shape.
        """

    def rows(self, codes: torch.Tensor, scales: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the output features ``index`` (1-D), as an embedding does: ``[len(index), in]`` in ``dtype``."""
        raise NotImplementedError(
            f"{type(self).__name__}: single rows of these codes cannot be read; use another format for embeddings"
        )

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor, out_features: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the whole weight ``[out_features, in_features]`` in ``dtype``."""
        parts = []
        for part in self.columns(codes, scales, out_features, dtype):
            weight = part.weight if part.scale is None else part.weight * part.scale
            parts.append(weight.t().contiguous() if part.scale is not None else weight.t().clone())
        return torch.cat(parts) if parts else scales.new_empty(0, self._width_of(codes), dtype=dtype)


class GroupCodes(PackedFormat):
    """``weight[n, k] = (code[n, k] + least) * scale[n, group of k] + offset[n, group of k]``.

    Codes are uint8 ``[out, bytes]``, ``8 / bits`` of them in a byte, the first in the lowest bits; scales are fp32
    ``[out, groups, 2]`` with scale and offset, or ``[out, groups, 1]`` where all offsets are zero.

    Args:
        bits: 1, 2, 4 or 8.
        in_features: Input features of the weight.
        groups: Equal parts of a row with scales of their own.
        least: The integer that code 0 represents.
        has_offset: Whether there are offsets.
    """

    few_rows = 0

    def __init__(
        self, bits: int, in_features: int, *, groups: int = 1, least: int = 0, has_offset: bool = True
    ) -> None:
        self.bits, self.in_features, self.groups = bits, in_features, groups
        self.least, self.has_offset = least, has_offset

    @override
    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (out_features, -(-in_features * self.bits // 8)), (out_features, self.groups, 1 + self.has_offset)

    @override
    def refusal(self, in_features: int) -> str | None:
        if in_features % self.groups == 0:
            return None
        return f"its {in_features} input features are not a multiple of {self.groups} groups"

    @override
    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds ``weight`` (``[out, in]``) to codes evenly spaced from the least to the largest value of a group."""
        groups = weight.detach().float().unflatten(1, (self.groups, -1))
        least, most = groups.amin(2), groups.amax(2)
        scale = (most - least) / (2**self.bits - 1)
        return self.encode(weight, torch.where(scale == 0, 1.0, scale), least - self.least * scale)

    def encode(
        self, weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encodes a weight with chosen scales, which are stored as fp32.

        Args:
            weight: ``[out, in]``.
            scale: ``[out, groups]``, fp32, none of them zero.
            offset: Like ``scale``; zeros if the format has no offsets.
        """
        groups = weight.detach().float().unflatten(1, (self.groups, -1))
        codes = ((groups - offset[..., None]) / scale[..., None]).round_().sub_(self.least).clamp_(0, 2**self.bits - 1)
        per_byte = 8 // self.bits
        flat = torch.nn.functional.pad(codes.flatten(1), (0, -self.in_features % per_byte)).to(torch.uint8)
        parts = flat.unflatten(1, (-1, per_byte)) << self._shifts(flat.device)
        scales = torch.stack((scale, offset), 2) if self.has_offset else scale[..., None]
        return parts.sum(2, dtype=torch.uint8), scales.float().contiguous()

    @override
    def columns(
        self, codes: torch.Tensor, scales: torch.Tensor, out_features: int, dtype: torch.dtype
    ) -> Iterator[Columns]:
        for start in range(0, out_features, _BLOCK):
            stop = min(start + _BLOCK, out_features)
            yield Columns(start, stop, self._values(codes[start:stop], scales[start:stop], dtype).t(), None)

    @override
    def _width_of(self, codes: torch.Tensor) -> int:
        return self.in_features

    @override
    def rows(self, codes: torch.Tensor, scales: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._values(codes[index], scales[index], dtype)

    @override
    def kernel(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
        return None  # torch has no kernel for this format

    def _shifts(self, device: torch.device) -> torch.Tensor:
        return torch.arange(0, 8, self.bits, dtype=torch.uint8, device=device)

    def _values(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Unpacks some rows; casts to ``dtype`` at the end, so that fp32 scales are not rounded first."""
        parts = (codes[:, :, None] >> self._shifts(codes.device)) & (2**self.bits - 1)
        flat = parts.flatten(1)[:, : self.in_features].float().add_(self.least)
        groups = flat.unflatten(1, (self.groups, -1)).mul_(scales[..., :1])
        if self.has_offset:
            groups.add_(scales[..., 1:])
        return groups.flatten(1).to(dtype)


GROUP_SIZES = (32, 64, 128, 256)
_BLOCK_int4 = 64
_HALF = _BLOCK_int4 // 2
_LEVELS = 15
_MIDDLE = 8  # the code of a group's offset


class Int4Groups(PackedFormat):
    """``weight[n, k] = (code[n, k] - 8) * scale[k // group, n] + offset[k // group, n]``.

    Codes are uint8 ``[blocks of 64 output features, in, 32]``, scales bfloat16 ``[in / group, 64 x blocks, 2]`` with
    scale and offset (fp32 from :meth:`encode`). Output features are padded with zeros to whole blocks.
    """

    bits = 4
    few_rows = 48

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    @override
    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        blocks = -(-out_features // _BLOCK_int4)
        return (blocks, in_features, _HALF), (in_features // self.group_size, blocks * _BLOCK_int4, 2)

    @override
    def refusal(self, in_features: int) -> str | None:
        if in_features % self.group_size == 0:
            return None
        return f"its {in_features} input features are not a multiple of the group size {self.group_size}"

    @override
    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds ``weight`` (``[out, in]``) to the nearest codes (uint8), with bf16 scales and offsets.

        Works in blocks of output features.
        """
        out_features, in_features = weight.shape
        codes_shape, scales_shape = self.shapes(out_features, in_features)
        codes = torch.empty(codes_shape, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(scales_shape, dtype=torch.bfloat16, device=weight.device)
        for number in range(len(codes)):
            start = number * _BLOCK_int4
            rows = weight.detach()[start : start + _BLOCK_int4].float()
            groups = pad(rows, (0, 0, 0, _BLOCK_int4 - len(rows))).view(_BLOCK_int4, -1, self.group_size)
            least, most = groups.amin(2), groups.amax(2)
            scale = ((most - least) / _LEVELS).to(torch.bfloat16)
            # A group of equal values is represented by its offset alone.
            offset = torch.where(scale == 0, least, least + _MIDDLE * scale.float()).to(torch.bfloat16)
            divisor = torch.where(scale == 0, 1, scale).float()
            codes[number] = _nearest(groups, divisor, offset.float())
            scales[:, start : start + _BLOCK_int4] = torch.stack((scale.t(), offset.t()), dim=2)
        return codes, scales

    def encode(
        self, weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encodes a weight with chosen scales, which are stored as fp32.

        Args:
            weight: ``[out, in]``.
            scale: ``[out, in / group]``, fp32, none of them zero.
            offset: Like ``scale``; the value of code 8.
        """
        out_features, in_features = weight.shape
        more = -out_features % _BLOCK_int4
        groups = pad(weight.detach().float(), (0, 0, 0, more)).view(-1, _BLOCK_int4, scale.shape[1], self.group_size)
        scale, offset = pad(scale, (0, 0, 0, more), value=1.0), pad(offset, (0, 0, 0, more))
        blocks = [scales.view(-1, _BLOCK_int4, scale.shape[1]) for scales in (scale, offset)]
        codes = torch.stack([_nearest(*block) for block in zip(groups, *blocks, strict=True)])
        return codes, torch.stack((scale.t(), offset.t()), dim=2).contiguous()

    @override
    def columns(
        self, codes: torch.Tensor, scales: torch.Tensor, out_features: int, dtype: torch.dtype
    ) -> Iterator[Columns]:
        """Yields blocks ``[in, features]``, all in one buffer: allocating would cost more than the arithmetic."""
        in_features = codes.shape[1]
        halves = torch.empty(in_features, _HALF, dtype=torch.uint8, device=codes.device)
        weight = torch.empty(in_features, _BLOCK_int4, dtype=dtype, device=codes.device)
        grouped = weight.view(-1, self.group_size, _BLOCK_int4)
        for number, block in enumerate(codes):
            start = number * _BLOCK_int4
            weight[:, :_HALF].copy_(torch.bitwise_and(block, 15, out=halves))
            weight[:, _HALF:].copy_(torch.bitwise_right_shift(block, 4, out=halves))
            weight.sub_(_MIDDLE)
            scale, offset = scales[:, start : start + _BLOCK_int4].to(dtype).unbind(2)
            torch.addcmul(offset.contiguous()[:, None], grouped, scale.contiguous()[:, None], out=grouped)
            stop = min(start + _BLOCK_int4, out_features)
            yield Columns(start, stop, weight[:, : stop - start], None)

    @override
    def kernel(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
        """Returns ``[rows, out or more]`` by torch's int4 kernel, which is fast for bfloat16 only; None otherwise."""
        if x.device.type != "cpu" or x.dtype != torch.bfloat16 or not _kernel_reads_it():
            return None
        packed = codes.view(-1, codes.shape[1] // 2)
        return torch._weight_int4pack_mm_for_cpu(x, packed, self.group_size, scales.to(x.dtype))


def _nearest(groups: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Returns the codes of a block, uint8 ``[in, 32]``, from its values, ``[64, groups, group size]``."""
    code = ((groups - offset[..., None]) / scale[..., None]).round_().add_(_MIDDLE).clamp_(0, _LEVELS)
    code = code.to(torch.uint8).view(_BLOCK_int4, -1).t()
    return code[:, :_HALF] | (code[:, _HALF:] << 4)


@cache
def _kernel_reads_it() -> bool:
    """Returns whether torch's kernel on this CPU has this module's layout of codes."""
    probe = torch.arange(_BLOCK_int4 * 64, dtype=torch.int32).view(_BLOCK_int4, 64).mul_(7).remainder_(16)
    try:
        theirs = torch._convert_weight_to_int4pack_for_cpu(probe, 1)
    except (AttributeError, RuntimeError):  # this torch or CPU lacks the private kernel
        return False
    code = probe.t().to(torch.uint8)
    ours = code[:, :_HALF] | (code[:, _HALF:] << 4)
    return theirs.numel() == ours.numel() and bool((theirs.flatten() == ours.flatten()).all())


def packed_format(bits: int, group_size: int = 64) -> PackedFormat:
    """Returns the format for ``bits`` bits.

    Args:
        bits: 8 (one scale per output feature) or 4 (a scale and an offset per group of input features).
        group_size: Input features that share a scale, at 4 bits: 32, 64, 128 or 256.

    Raises:
        ValueError: There is no format for these values.
    """
    if bits == 8:
        return Int8Rows()
    if bits != 4:
        raise ValueError(f"packed_format(bits={bits}): expected 8 or 4; use one of these")
    if group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ValueError(f"packed_format(group_size={group_size}): expected one of {sizes} at 4 bits; use one of these")
    return Int4Groups(group_size)


_LARGEST = 127
_VECTOR = 32  # with 24, 33 or 40 input features torch 2.13's kernel crashes the process (AVX-512)
_BLOCK = 512  # output features unpacked at a time: 4 MB at 4,096 input features, which a core's cache holds


class Int8Rows(PackedFormat):
    """``weight[n, k] = codes[n, k] * scales[n]``, codes int8 ``[out, in]``, scales bfloat16 ``[out]``."""

    bits = 8
    few_rows = 12

    @override
    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (out_features, in_features), (out_features,)

    @override
    def refusal(self, in_features: int) -> str | None:
        return None

    @override
    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds ``weight`` (``[out, in]``) to the nearest int8 codes, with bf16 scales."""
        scales = (weight.detach().abs().amax(1).float() / _LARGEST).to(torch.bfloat16)
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        for start in range(0, len(weight), _BLOCK):
            rows = slice(start, start + _BLOCK)
            divisor = scales[rows].float()
            divisor[divisor == 0] = 1  # a row of zeros
            codes[rows] = (weight.detach()[rows].float() / divisor[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
        return codes, scales

    @override
    def columns(
        self, codes: torch.Tensor, scales: torch.Tensor, out_features: int, dtype: torch.dtype
    ) -> Iterator[Columns]:
        """Yields codes ``[in, features]`` in ``dtype`` with their scales.

        Codes are exact in every floating dtype. The caller multiplies the product by the scales, as it is smaller. In
        fp16, products with codes of up to 127 would overflow; there the weight is multiplied.
        """
        if dtype == torch.float16:
            for start in range(0, out_features, _BLOCK):
                rows = slice(start, min(start + _BLOCK, out_features))
                values = codes[rows].float() * scales[rows].float()[:, None]
                yield Columns(start, rows.stop, values.to(dtype).t(), None)
            return
        buffer = torch.empty(min(_BLOCK, out_features), codes.shape[1], dtype=dtype, device=codes.device)
        scales = scales.to(dtype)
        for start in range(0, out_features, _BLOCK):
            stop = min(start + _BLOCK, out_features)
            block = buffer[: stop - start].copy_(codes[start:stop])
            yield Columns(start, stop, block.t(), scales[start:stop])

    @override
    def kernel(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
        """Returns ``[rows, out]`` by torch's int8 kernel; None where it would be slow.

        It is fast for bfloat16 only, and reads whole vectors of input features.
        """
        if x.device.type != "cpu" or x.dtype != torch.bfloat16 or x.shape[1] % _VECTOR:
            return None
        return torch._weight_int8pack_mm(x, codes, scales.to(x.dtype))

    @override
    def rows(self, codes: torch.Tensor, scales: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (codes[index].float() * scales[index].float()[:, None]).to(dtype)


def packed_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    out_features: int,
    how: PackedFormat,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns ``x @ weight.t() + bias`` where the weight is packed.

    Args:
        x: ``[..., in_features]``, bfloat16, float16 or float32; the product is computed in this dtype.
        bias: ``[out_features]`` or None.

    Returns:
        ``[..., out_features]`` in the dtype of ``x``. Gradients reach ``x`` and ``bias``; the weight is fixed.
    """
    flat = x.reshape(-1, x.shape[-1])
    product: torch.Tensor = _PackedLinear.apply(flat, codes, scales, out_features, how)  # type: ignore[no-untyped-call]
    if bias is not None:
        product = product + bias.to(product.dtype)
    return product.view(*x.shape[:-1], out_features)


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, out_features: int, how: PackedFormat
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.in_features, ctx.out_features, ctx.how = x.shape[1], out_features, how
        if len(x) <= how.few_rows:
            product = how.kernel(x.contiguous(), codes, scales)
            if product is not None:
                return product[:, :out_features]
        out = x.new_empty(len(x), out_features)
        for part in how.columns(codes, scales, out_features, x.dtype):
            columns = torch.mm(x, part.weight, out=out[:, part.start : part.stop])
            if part.scale is not None:
                columns.mul_(part.scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        codes, scales = ctx.saved_tensors
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        total = grad.new_zeros(len(grad), ctx.in_features, dtype=torch.float32)  # a sum of many products
        for part in ctx.how.columns(codes, scales, ctx.out_features, grad.dtype):
            columns = grad[:, part.start : part.stop]
            total += torch.mm(columns if part.scale is None else columns * part.scale, part.weight.t())
        return total.to(grad.dtype), None, None, None, None
