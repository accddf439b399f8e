"""What a format of packed weights can do.

A weight of a linear layer, ``[out_features, in_features]``, becomes two tensors: ``codes`` (whole numbers) and
``scales`` (bfloat16). Both are plain tensors that can be parameters, buffers or lie in a file; their layout depends on
no machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Columns(NamedTuple):
    """A few output features of an unpacked weight.

    Attributes:
        start: The first of them.
        stop: One after the last.
        weight: ``[in_features, stop - start]``, in the dtype that was asked for. Its memory is used again for the next.
        scale: ``[stop - start]``, by which the product with ``weight`` is still to be multiplied; None: by nothing.
    """

    start: int
    stop: int
    weight: torch.Tensor
    scale: torch.Tensor | None


class PackedFormat(ABC):
    """One way to keep a weight in few bits.

    Attributes:
        bits: Width of a code.
        few_rows: Up to so many rows of bfloat16 activations torch's packed kernel on the CPU is faster than unpacking
            the weight block by block (measured on a CPU with AVX-512, 4096 x 4096).
    """

    bits: int
    few_rows: int

    @abstractmethod
    def shapes(self, out_features: int, in_features: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of codes and scales."""

    @abstractmethod
    def refusal(self, in_features: int) -> str | None:
        """Why a weight with so many input features cannot be packed; None: it can."""

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rounds ``weight`` (``[out, in]``, finite, any floating dtype) to codes and scales on its device.

        Their shapes are those of :meth:`shapes`.
        """

    @abstractmethod
    def columns(
        self, codes: torch.Tensor, scales: torch.Tensor, out_features: int, dtype: torch.dtype
    ) -> Iterator[Columns]:
        """Yields the weight block by block of output features, so that it is never whole in memory.

        Each block is ``[in, features]`` in ``dtype``.
        """

    @abstractmethod
    def kernel(self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor | None:
        """The product by torch's packed kernel: ``[rows, in] -> [rows, out or more]``; None where there is none."""

    def rows(self, codes: torch.Tensor, scales: torch.Tensor, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Some output features, ``[len(index), in_features]``: what an embedding looks up."""
        raise NotImplementedError(f"{type(self).__name__} has no order in which single rows can be read")

    def unpack(self, codes: torch.Tensor, scales: torch.Tensor, out_features: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the whole weight ``[out_features, in_features]`` in ``dtype``."""
        parts = []
        for part in self.columns(codes, scales, out_features, dtype):
            weight = part.weight if part.scale is None else part.weight * part.scale
            parts.append(weight.t().contiguous() if part.scale is not None else weight.t().clone())
        return torch.cat(parts)
