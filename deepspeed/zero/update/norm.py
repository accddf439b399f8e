"""The squared L2 norm, the same number on every layout, stage and world size.

The buffer is read as blocks of 64 elements, which no layout ever cuts. Each block's norm is taken in fp32; its square
is exact in fp64 and the squares are added there. The order of the fp64 sum moves the result by about 1e-16, which
``norm_from_squares`` rounds away by ending in fp32, so that clipping cannot tell two layouts apart.
"""

from __future__ import annotations

import math

import torch

from deepspeed.zero.tiling.layout import BLOCK

_CHUNK_BLOCKS = 4096  # 1 MiB of fp32: the cast copy of a 16-bit buffer stays in cache


def squared_norm(flat: torch.Tensor) -> torch.Tensor:
    """Sum of squares of a flat buffer.

    Args:
        flat: 1-D, any floating dtype, length a multiple of 64; padding must hold zeros.

    Returns:
        0-dim fp64 tensor on the buffer's device; not finite if any element is not.
    """
    blocks = flat.view(-1, BLOCK)
    if flat.dtype == torch.float32:
        return torch.linalg.vector_norm(blocks, dim=1).double().square_().sum()
    if flat.device.type != "cpu":
        return torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float32).double().square_().sum()
    norms = [torch.linalg.vector_norm(part.float(), dim=1) for part in blocks.split(_CHUNK_BLOCKS)]
    return torch.cat(norms).double().square_().sum() if norms else flat.new_zeros((), dtype=torch.float64)


class Squares:
    """The sum of squares of a buffer, added up while its parts are in the cache anyway.

    Args:
        device: Of the buffer.
    """

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, part: torch.Tensor) -> None:
        """Adds a part: 1-D, whole blocks of 64 elements."""
        self._total += squared_norm(part)

    @property
    def total(self) -> torch.Tensor:
        """The sum so far: 0-dim fp64, on the buffer's device."""
        return self._total


def norm_from_squares(total: float) -> float:
    """Returns the norm, rounded to fp32 so that it does not depend on the order of the sum; nan and inf pass."""
    if not math.isfinite(total):
        return total
    return torch.tensor(math.sqrt(total), dtype=torch.float32).item()
