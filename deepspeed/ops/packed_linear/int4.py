"""Four bits: a scale and an offset per group of input features.

The codes lie as torch's kernel for CPUs with AVX-512 reads them, whatever the machine: 64 output features make a block,
in which a byte holds the codes of features j (low half) and j + 32 (high half) at one input feature. Where the kernel
of a machine wants another order (:func:`_kernel_reads_it` asks it once), the weight is unpacked instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch.nn.functional import pad

from deepspeed.ops.packed_linear.format import Columns, PackedFormat

GROUP_SIZES = (32, 64, 128, 256)
_BLOCK = 64
_HALF = _BLOCK // 2
_LEVELS = 15
_MIDDLE = 8  # the code of a group's offset


class Int4Groups(PackedFormat):
    """``weight[n, k] = (code[n, k] - 8) * scale[k // group, n] + offset[k // group, n]``.

    Codes are uint8 ``[blocks of 64 output features, in, 32]``, scales bfloat16 ``[in / group, 64 x blocks, 2]`` with
    scale and offset. Output features are filled up with zeros to whole blocks.
    """

    bits = 4
    few_rows = 48

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of codes and scales."""
        blocks = -(-out_features // _BLOCK)
        return (blocks, in_features, _HALF), (in_features // self.group_size, blocks * _BLOCK, 2)

    def refusal(self, in_features: int) -> str | None:
        """Groups must be whole."""
        if in_features % self.group_size == 0:
            return None
        return f"its {in_features} input features are no multiple of the group size {self.group_size}"

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds ``weight`` (``[out, in]``) to the nearest codes (uint8), for bf16 scales and offsets.

        Works block by block of output features.
        """
        out_features, in_features = weight.shape
        codes_shape, scales_shape = self.shapes(out_features, in_features)
        codes = torch.empty(codes_shape, dtype=torch.uint8, device=weight.device)
        scales = torch.empty(scales_shape, dtype=torch.bfloat16, device=weight.device)
        for number in range(len(codes)):
            start = number * _BLOCK
            rows = weight.detach()[start : start + _BLOCK].float()
            groups = pad(rows, (0, 0, 0, _BLOCK - len(rows))).view(_BLOCK, -1, self.group_size)
            least, most = groups.amin(2), groups.amax(2)
            scale = ((most - least) / _LEVELS).to(torch.bfloat16)
            # Of a group of equal values the offset alone is left.
            offset = torch.where(scale == 0, least, least + _MIDDLE * scale.float()).to(torch.bfloat16)
            divisor = torch.where(scale == 0, 1, scale).float()
            codes[number] = _nearest(groups, divisor, offset.float())
            scales[:, start : start + _BLOCK] = torch.stack((scale.t(), offset.t()), dim=2)
        return codes, scales

    def encode(
        self, weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of a weight whose scales are known; these stay in fp32.

        Args:
            weight: ``[out, in]``.
            scale: ``[out, in / group]``, fp32, none of them zero.
            offset: The same: what the code 8 stands for.
        """
        out_features, in_features = weight.shape
        more = -out_features % _BLOCK
        groups = pad(weight.detach().float(), (0, 0, 0, more)).view(-1, _BLOCK, scale.shape[1], self.group_size)
        scale, offset = pad(scale, (0, 0, 0, more), value=1.0), pad(offset, (0, 0, 0, more))
        blocks = [scales.view(-1, _BLOCK, scale.shape[1]) for scales in (scale, offset)]
        codes = torch.stack([_nearest(*block) for block in zip(groups, *blocks, strict=True)])
        return codes, torch.stack((scale.t(), offset.t()), dim=2).contiguous()

    def columns(
        self, codes: torch.Tensor, scales: torch.Tensor, out_features: int, dtype: torch.dtype
    ) -> Iterator[Columns]:
        """Yields blocks ``[in, features]``, unpacked in place: new memory would cost more than the arithmetic."""
        in_features = codes.shape[1]
        halves = torch.empty(in_features, _HALF, dtype=torch.uint8, device=codes.device)
        weight = torch.empty(in_features, _BLOCK, dtype=dtype, device=codes.device)
        grouped = weight.view(-1, self.group_size, _BLOCK)
        for number, block in enumerate(codes):
            start = number * _BLOCK
            weight[:, :_HALF].copy_(torch.bitwise_and(block, 15, out=halves))
            weight[:, _HALF:].copy_(torch.bitwise_right_shift(block, 4, out=halves))
            weight.sub_(_MIDDLE)
            scale, offset = scales[:, start : start + _BLOCK].to(dtype).unbind(2)
            torch.addcmul(offset.contiguous()[:, None], grouped, scale.contiguous()[:, None], out=grouped)
            stop = min(start + _BLOCK, out_features)
            yield Columns(start, stop, weight[:, : stop - start], None)

    def kernel(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
        """Returns ``[rows, out or more]`` by torch's int4 kernel, which is fast for bfloat16 only; None otherwise."""
        if x.device.type != "cpu" or x.dtype != torch.bfloat16 or not _kernel_reads_it():
            return None
        whole = codes.view(-1, codes.shape[1] // 2)
        product: torch.Tensor = torch._weight_int4pack_mm_for_cpu(x, whole, self.group_size, scales.to(x.dtype))
        return product


def _nearest(groups: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Returns a block of codes, ``[in, 32]``, from ``[64, groups, group size]``."""
    code = ((groups - offset[..., None]) / scale[..., None]).round_().add_(_MIDDLE).clamp_(0, _LEVELS)
    code = code.to(torch.uint8).view(_BLOCK, -1).t()
    return code[:, :_HALF] | (code[:, _HALF:] << 4)


@cache
def _kernel_reads_it() -> bool:
    """Returns whether torch's kernel on this CPU has this module's order of codes."""
    probe = torch.arange(_BLOCK * 64, dtype=torch.int32).view(_BLOCK, 64).mul_(7).remainder_(16)
    try:
        theirs = torch._convert_weight_to_int4pack_for_cpu(probe, 1)
    except (AttributeError, RuntimeError):  # a private kernel that this torch or CPU is without
        return False
    code = probe.t().to(torch.uint8)
    ours = code[:, :_HALF] | (code[:, _HALF:] << 4)
    return theirs.numel() == ours.numel() and bool((theirs.flatten() == ours.flatten()).all())
