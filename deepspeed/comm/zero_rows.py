"""Rows that are zeros and travel as zeros, beside codes that cannot say 0.

A sign is + or -, so what never had a gradient (rows of an embedding that no sample names, padding) would receive plus
or minus a scale at every step. A bit for each row says whether anything in it is not zero. A row is a whole one, or the
part of one that a slice holds, and each sender speaks of its own values: what it owes (``Residual``) is among them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ALIGNMENT = 8  # bytes


class ZeroRows:
    """The rows of a flat buffer of equal slices.

    Args:
        starts: Where rows begin in it, in ascending order, from 0 on; a row ends where the next one begins.
        numel: Length of the buffer.
        slices: How many slices it has.
        device: Where values are.
    """

    def __init__(self, starts: Sequence[int], numel: int, slices: int, device: torch.device) -> None:
        every = torch.tensor(starts, dtype=torch.int64)
        self._length = length = numel // slices
        self._lengths: list[torch.Tensor] = []
        for start in range(0, numel, max(length, 1)):
            inside = every[(every > start) & (every < start + length)] - start
            bounds = torch.cat([torch.tensor([0]), inside, torch.tensor([length])])
            self._lengths.append(torch.diff(bounds).to(device))
        most = max((rows.numel() for rows in self._lengths), default=0)
        self.nbytes = -(-most // (8 * _ALIGNMENT)) * _ALIGNMENT
        self._weights = (2 ** torch.arange(8, dtype=torch.uint8)).to(device)

    def write(
        self, index: int, values: torch.Tensor, error: torch.Tensor | None, flags: torch.Tensor
    ) -> torch.Tensor | None:
        """Writes which rows of a slice are not all zeros.

        Args:
            index: Of the slice.
            values: Of it, 1-D.
            error: What is added to them, 1-D; None: nothing.
            flags: 1-D bytes, :attr:`nbytes` of them.

        Returns:
            1 for each element of the others and 0 for those of zero rows, 1-D fp32; None where there are no zero rows.
        """
        if values.device.type == "cpu" and int(torch.count_nonzero(values)) == values.numel():
            flags.fill_(255)
            return None
        is_set = values != 0
        if error is not None:
            is_set |= error != 0
        lengths = self._lengths[index]
        counts = torch.cumsum(is_set, 0, dtype=torch.int32)[torch.cumsum(lengths, 0) - 1]
        rows = torch.diff(counts, prepend=counts.new_zeros(1)) > 0
        bits = torch.ones(8 * flags.numel(), dtype=torch.uint8, device=flags.device)
        bits[: rows.numel()] = rows
        flags.copy_((bits.view(-1, 8) * self._weights).sum(dim=1))
        return self.mask(index, flags)

    def mask(self, index: int, flags: torch.Tensor) -> torch.Tensor | None:
        """As :meth:`write` returns it, from what it wrote."""
        if flags.device.type == "cpu" and bool((flags == 255).all()):
            return None
        lengths = self._lengths[index]
        rows = (flags.unsqueeze(1) & self._weights).view(-1)[: lengths.numel()] != 0
        return torch.repeat_interleave(rows.to(torch.float32), lengths, output_size=self._length)


def row_starts(starts: Sequence[int], shapes: Sequence[Sequence[int]], numel: int) -> list[int]:
    """Where the rows of tensors in a flat buffer begin, and the stretches between them.

    A tensor of two or more dimensions has rows along its first one; any other is one row.

    Args:
        starts: Of the tensors, in ascending order.
        shapes: Of the tensors.
        numel: Length of the buffer.
    """
    found = [0]
    for start, shape in zip(starts, shapes, strict=True):
        total = 1
        for size in shape:
            total *= size
        length = total // shape[0] if len(shape) > 1 and total > shape[0] > 0 else total
        found += range(start, start + total, max(length, 1))
        found.append(start + total)
    return sorted({place for place in found if place < numel})
