"""One to eight bits as a training with rounded weights left them: codes beside each other, a scale for each group.

This format keeps values exactly; those of 8 and of 4 bits with a kernel are :mod:`.int8` and :mod:`.int4`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed.ops.packed_linear.format import Columns, PackedFormat

_BLOCK = 512  # output features unpacked at a time


class GroupCodes(PackedFormat):
    """``weight[n, k] = (code[n, k] + least) * scale[n, group of k] + offset[n, group of k]``.

    Codes are uint8 ``[out, bytes]``, ``8 / bits`` of them in a byte, the first in the lowest bits; scales are fp32
    ``[out, groups, 2]`` with scale and offset, or ``[out, groups, 1]`` where all offsets are zero.

    Args:
        bits: 1, 2, 4 or 8.
        in_features: Of the weight.
        groups: Equal parts of a row with scales of their own.
        least: What the code 0 stands for.
        has_offset: Whether there are offsets.
    """

    few_rows = 0

    def __init__(
        self, bits: int, in_features: int, *, groups: int = 1, least: int = 0, has_offset: bool = True
    ) -> None:
        self.bits, self.in_features, self.groups = bits, in_features, groups
        self.least, self.has_offset = least, has_offset

    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of codes and scales."""
        return (out_features, -(-in_features * self.bits // 8)), (out_features, self.groups, 1 + self.has_offset)

    def refusal(self, in_features: int) -> str | None:
        """Groups must be whole."""
        if in_features % self.groups == 0:
            return None
        return f"its {in_features} input features are no multiple of {self.groups} groups"

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds ``weight`` (``[out, in]``) to codes evenly spaced from the least to the largest value of a group."""
        groups = weight.detach().float().view(len(weight), self.groups, -1)
        least, most = groups.amin(2), groups.amax(2)
        scale = (most - least) / (2**self.bits - 1)
        return self.encode(weight, torch.where(scale == 0, 1.0, scale), least - self.least * scale)

    def encode(
        self, weight: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of a weight whose scales are known.

        Args:
            weight: ``[out, in]``.
            scale: ``[out, groups]``, fp32, none of them zero.
            offset: The same; zeros where the format has none.
        """
        groups = weight.detach().float().view(len(weight), self.groups, -1)
        codes = ((groups - offset[..., None]) / scale[..., None]).round_().sub_(self.least).clamp_(0, 2**self.bits - 1)
        per_byte = 8 // self.bits
        flat = torch.nn.functional.pad(codes.view(len(weight), -1), (0, -self.in_features % per_byte)).to(torch.uint8)
        parts = flat.view(len(weight), -1, per_byte) << self._shifts(flat.device)
        scales = torch.stack((scale, offset), 2) if self.has_offset else scale[..., None]
        return parts.sum(2, dtype=torch.uint8), scales.float().contiguous()

    def columns(
        self, codes: torch.Tensor, scales: torch.Tensor, out_features: int, dtype: torch.dtype
    ) -> Iterator[Columns]:
        """Yields blocks ``[in, features]`` in ``dtype``."""
        for start in range(0, out_features, _BLOCK):
            stop = min(start + _BLOCK, out_features)
            yield Columns(start, stop, self._values(codes[start:stop], scales[start:stop], dtype).t(), None)

    def rows(self, codes: torch.Tensor, scales: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the output features ``index`` (1-D): ``[len(index), in]`` in ``dtype``."""
        return self._values(codes[index], scales[index], dtype)

    def kernel(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
        """Returns None: torch has no kernel for this format, whatever the shape."""
        return None

    def _shifts(self, device: torch.device) -> torch.Tensor:
        return torch.arange(0, 8, self.bits, dtype=torch.uint8, device=device)

    def _values(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Unpacks some rows; ``dtype`` is reached in the end, so that fp32 scales count in full."""
        parts = (codes[:, :, None] >> self._shifts(codes.device)) & (2**self.bits - 1)
        flat = parts.view(len(codes), -1)[:, : self.in_features].float().add_(self.least)
        groups = flat.view(len(codes), self.groups, -1).mul_(scales[..., :1])
        if self.has_offset:
            groups.add_(scales[..., 1:])
        return groups.view(len(codes), -1).to(dtype)
