"""Eight bits: symmetric, one scale per output feature."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from deepspeed.ops.packed_linear.format import Columns, PackedFormat

_LARGEST = 127
_VECTOR = 32  # with 24, 33 or 40 input features torch 2.13's kernel ends the process (AVX-512)
_BLOCK = 512  # output features unpacked at a time: 4 MB at 4,096 input features, which a core's cache holds


class Int8Rows(PackedFormat):
    """``weight[n, k] = codes[n, k] * scales[n]``, codes int8 ``[out, in]``, scales bfloat16 ``[out]``."""

    bits = 8
    few_rows = 12

    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of codes and scales."""
        return (out_features, in_features), (out_features,)

    def refusal(self, in_features: int) -> str | None:
        """Any number of input features can be packed."""
        return None

    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds ``weight`` (``[out, in]``) to the nearest int8 codes, for the bf16 scales that are kept."""
        scales = (weight.detach().abs().amax(1).float() / _LARGEST).to(torch.bfloat16)
        codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
        for start in range(0, len(weight), _BLOCK):
            rows = slice(start, start + _BLOCK)
            divisor = scales[rows].float()
            divisor[divisor == 0] = 1  # a row of zeros
            codes[rows] = (weight.detach()[rows].float() / divisor[:, None]).round_().clamp_(-_LARGEST, _LARGEST)
        return codes, scales

    def columns(
        self, codes: torch.Tensor, scales: torch.Tensor, out_features: int, dtype: torch.dtype
    ) -> Iterator[Columns]:
        """Yields codes ``[in, features]`` in ``dtype`` with their scales.

        Codes are exact in every floating dtype. The scale is left to the product, which is smaller.
        """
        buffer = torch.empty(min(_BLOCK, out_features), codes.shape[1], dtype=dtype, device=codes.device)
        scales = scales.to(dtype)
        for start in range(0, out_features, _BLOCK):
            stop = min(start + _BLOCK, out_features)
            block = buffer[: stop - start].copy_(codes[start:stop])
            yield Columns(start, stop, block.t(), scales[start:stop])

    def kernel(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
        """Returns ``[rows, out]`` by torch's int8 kernel; None where it would be slow.

        It is fast for bfloat16 only, and reads whole vectors of input features.
        """
        if x.device.type != "cpu" or x.dtype != torch.bfloat16 or x.shape[1] % _VECTOR:
            return None
        product: torch.Tensor = torch._weight_int8pack_mm(x, codes, scales.to(x.dtype))
        return product

    def rows(self, codes: torch.Tensor, scales: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the output features ``index`` (1-D): ``[len(index), in]`` in ``dtype``."""
        return (codes[index].float() * scales[index].float()[:, None]).to(dtype)
