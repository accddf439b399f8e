"""Per-tensor sums and factors over a flat run, by blocks of 64 elements.

Tensors start at multiples of 64 elements and are cut only there, so a block never holds two tensors and is the same
64 elements under any sharding. Norms are taken per block in fp32 and their squares added per tensor in fp64: the
result does not depend on how the run is cut beyond the last bits of fp64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepspeed.ops.segments import Segment

BLOCK_NUMEL = 64


class BlockMap:
    """Which tensor each block of a run belongs to.

    Args:
        segments: The run's tensors in order, starting at multiples of 64; gaps and the tail are padding.
        numel: Elements of the run.
        num_tensors: How many tensors there are on all ranks.
        device: Where the run lives.

    Raises:
        ValueError: A tensor does not start at a multiple of 64, in the run or of its own elements.
    """

    def __init__(self, segments: tuple[Segment, ...], numel: int, num_tensors: int, device: torch.device) -> None:
        self.num_blocks = -(-numel // BLOCK_NUMEL)
        self._num_tensors = num_tensors
        owners: list[int] = []  # per stretch of blocks: the tensor, or num_tensors for a gap
        lengths: list[int] = []
        position = 0
        for segment in segments:
            if segment.start % BLOCK_NUMEL or segment.tensor_start % BLOCK_NUMEL:
                raise ValueError(
                    f"{segment.name}: pieces must start at multiples of {BLOCK_NUMEL} elements, in the run and in the "
                    f"tensor, but this one starts at {segment.start} and {segment.tensor_start}"
                )
            first, last = segment.start // BLOCK_NUMEL, -(-segment.stop // BLOCK_NUMEL)
            owners += [num_tensors, segment.index]
            lengths += [first - position, last - first]
            position = last
        owners.append(num_tensors)
        lengths.append(self.num_blocks - position)
        self._owners = torch.tensor(owners, device=device)
        self._lengths = torch.tensor(lengths, device=device)

    def sums(self, block_values: Tensor) -> Tensor:
        """Sums ``block_values`` (``[rows, blocks]``, fp64) per tensor, in a fixed order: ``[rows, num_tensors]``."""
        sums = torch.segment_reduce(block_values.T.contiguous(), "sum", lengths=self._lengths, axis=0, unsafe=True)
        totals = block_values.new_zeros(self._num_tensors + 1, block_values.shape[0])
        # Each tensor has at most one stretch in a run, so this adds one value to a zero; only padding adds several.
        return totals.index_add_(0, self._owners, sums)[: self._num_tensors].T.contiguous()

    def most(self, block_values: Tensor) -> Tensor:
        """Returns the largest of ``block_values`` (``[blocks]``, fp64, not negative) per tensor: ``[num_tensors]``.

        0 for tensors without a block here.
        """
        totals = block_values.new_zeros(self._num_tensors + 1)
        owners = self._owners.repeat_interleave(self._lengths, output_size=self.num_blocks)
        return totals.scatter_reduce_(0, owners, block_values, "amax")[: self._num_tensors]

    def spread(self, per_tensor: Tensor, fill: float) -> Tensor:
        """Copies one value per tensor (``[num_tensors]``) to its blocks: ``[blocks]``; padding gets ``fill``."""
        with_padding = torch.cat([per_tensor, per_tensor.new_full((1,), fill)])
        return with_padding[self._owners].repeat_interleave(self._lengths, output_size=self.num_blocks)


def block_squares(flat: Tensor, out: Tensor) -> None:
    """Writes the squared norm of every block of ``flat`` (1-D; the last may be short) to ``out`` (fp64)."""
    whole = flat.numel() // BLOCK_NUMEL
    body = flat[: whole * BLOCK_NUMEL].view(whole, BLOCK_NUMEL)
    out[:whole] = torch.linalg.vector_norm(body, dim=1)
    if flat.numel() % BLOCK_NUMEL:
        out[whole] = torch.linalg.vector_norm(flat[whole * BLOCK_NUMEL :])
    out.square_()


def block_most(flat: Tensor) -> Tensor:
    """Returns the largest element of every block of ``flat`` (1-D; the last may be short), fp64."""
    whole = flat.numel() // BLOCK_NUMEL
    most = [flat[: whole * BLOCK_NUMEL].view(whole, BLOCK_NUMEL).amax(dim=1)] if whole else []
    if flat.numel() % BLOCK_NUMEL:
        most.append(flat[whole * BLOCK_NUMEL :].amax(dim=0, keepdim=True))
    return torch.cat(most).double() if most else flat.new_zeros(0, dtype=torch.float64)


def multiply_blocks(flat: Tensor, factors: Tensor) -> None:
    """Multiplies every block of ``flat`` (the last may be short) by its factor, in place."""
    whole = flat.numel() // BLOCK_NUMEL
    flat[: whole * BLOCK_NUMEL].view(whole, BLOCK_NUMEL).mul_(factors[:whole, None])
    if flat.numel() % BLOCK_NUMEL:
        flat[whole * BLOCK_NUMEL :].mul_(factors[whole])
