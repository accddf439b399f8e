"""Marks rows of zeros, for codecs that cannot encode 0.

A sign is + or -, so elements that never had a gradient (unused rows of an embedding, padding) would decode to plus or
minus a scale at every step. So a bit per row tells whether the row has a nonzero element. A row may be the part of a
row in one slice. Each sender's bits are those of its own values plus its error feedback (``Residual``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

_ALIGNMENT = 8  # bytes


class ZeroRows:
    """The rows of a flat buffer of ``numel`` elements in equal ``slices``; ``starts`` are where rows begin."""

    def __init__(self, starts: Sequence[int], numel: int, slices: int, device: torch.device) -> None:
        every = torch.tensor(starts, dtype=torch.int64)
        length, parts = numel // slices, []
        for start in range(0, numel, max(length, 1)):
            inside = every[(every > start) & (every < start + length)] - start
            bounds = torch.cat([torch.tensor([0]), inside, torch.tensor([length])])
            parts.append(torch.diff(bounds))
        most = max((rows.numel() for rows in parts), default=0)
        self.nbytes = -(-most // (8 * _ALIGNMENT)) * _ALIGNMENT
        self._length = length
        self._first = [0]  # of each slice, the number of its first row
        for rows in parts:
            self._first.append(self._first[-1] + rows.numel())
        self._lengths = torch.cat(parts).to(device) if parts else torch.zeros(0, dtype=torch.int64, device=device)
        places = [torch.arange(rows.numel()) + 8 * self.nbytes * index for index, rows in enumerate(parts)]
        self._places = (torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)).to(device)
        self._weights = (2 ** torch.arange(8, dtype=torch.uint8)).to(device)

    def write(
        self, first: int, values: torch.Tensor, error: torch.Tensor | None, flags: torch.Tensor
    ) -> torch.Tensor | None:
        """Writes into ``flags`` which rows of the slices from number ``first`` on are not all zeros.

        Args:
            values: The slices, 2-D ``[slices, elements]``.
            error: What is added to them, in the same shape; None: nothing.
            flags: Bytes, ``[slices, nbytes]``.

        Returns:
            True for each element of the other rows and False for those of zero rows, bool ``[slices, elements]``; None
            where there are no zero rows.
        """
        if values.device.type == "cpu" and int(torch.count_nonzero(values)) == values.numel():
            flags.fill_(255)
            return None
        is_set = values != 0
        if error is not None:
            is_set |= error != 0
        lengths, places = self._rows_of(first, values.shape[0])
        counts = torch.cumsum(is_set.view(-1), 0, dtype=torch.int32)[torch.cumsum(lengths, 0) - 1]
        rows = torch.diff(counts, prepend=counts.new_zeros(1)) > 0
        bits = torch.ones(8 * flags.numel(), dtype=torch.uint8, device=flags.device)
        bits[places] = rows.to(torch.uint8)
        flags.copy_((bits.view(flags.shape[0], -1, 8) * self._weights).sum(dim=2))
        return self.mask(first, flags)

    def mask(self, first: int, flags: torch.Tensor) -> torch.Tensor | None:
        """Returns what :meth:`write` returns, bools ``[slices, elements]`` or None, from ``flags`` that it wrote."""
        if flags.device.type == "cpu" and bool((flags == 255).all()):
            return None
        lengths, places = self._rows_of(first, flags.shape[0])
        rows = self._bits(flags).view(-1)[places]
        return torch.repeat_interleave(rows, lengths, output_size=flags.shape[0] * self._length).view(
            flags.shape[0], -1
        )

    def masks_of(self, index: int, flags: torch.Tensor) -> torch.Tensor | None:
        """Returns the masks of the slice number ``index`` from the ``flags`` of several ranks, ``[ranks, nbytes]``.

        They are bools ``[ranks, elements of the slice]``: False in rows of zeros. None if no rank marked a row.
        """
        if flags.device.type == "cpu" and bool((flags == 255).all()):
            return None
        lengths, _ = self._rows_of(index, 1)
        rows = self._bits(flags)[:, : lengths.numel()]
        return torch.repeat_interleave(rows, lengths, dim=1, output_size=self._length)

    def numbers(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of the rows of ``flat``, the whole buffer, that are not all zeros: 1-D int64, ascending.

        A row that is cut by slices has one number per slice.
        """
        counts = torch.cumsum(flat != 0, 0)[torch.cumsum(self._lengths, 0) - 1]
        return torch.nonzero(torch.diff(counts, prepend=counts.new_zeros(1))).view(-1)

    def per_slice(self, numbers: torch.Tensor) -> list[tuple[int, int]]:
        """Returns how many of these rows (1-D, from :meth:`numbers`) and of their elements each slice has."""
        lengths = self._lengths[numbers]
        bounds = torch.searchsorted(numbers, torch.tensor(self._first, device=numbers.device)).tolist()
        return [(stop - start, int(lengths[start:stop].sum())) for start, stop in itertools.pairwise(bounds)]

    def elements(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns where the elements of rows, by 1-D ``numbers``, are in the whole buffer: 1-D int64, row after row."""
        lengths = self._lengths[numbers]
        starts = (torch.cumsum(self._lengths, 0) - self._lengths)[numbers]
        before = torch.cumsum(lengths, 0) - lengths
        total = int(lengths.sum())
        shift = torch.repeat_interleave(starts - before, lengths, output_size=total)
        return torch.arange(total, device=numbers.device) + shift

    def _bits(self, flags: torch.Tensor) -> torch.Tensor:
        """Returns the flags as bools, ``[rows of flags, 8 * nbytes]``."""
        return (flags.unsqueeze(2) & self._weights).view(flags.shape[0], -1) != 0

    def _rows_of(self, first: int, slices: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the lengths of the rows of consecutive slices, and the places of their bits from the first slice."""
        start, stop = self._first[first], self._first[first + slices]
        return self._lengths[start:stop], self._places[start:stop] - 8 * self.nbytes * first


def row_starts(starts: Sequence[int], shapes: Sequence[Sequence[int]], numel: int) -> list[int]:
    """Returns where the rows of tensors in a flat buffer of ``numel`` elements begin, and the gaps between them.

    A tensor of two or more dimensions has rows along its first one. Others are one row, and so are rows of one element.
    ``starts`` are where the tensors start, in ascending order.
    """
    rows = [0]
    for start, shape in zip(starts, shapes, strict=True):
        total = math.prod(shape)
        length = total // shape[0] if len(shape) > 1 and total > shape[0] > 0 else total
        rows += range(start, start + total, max(length, 1))
        rows.append(start + total)
    return sorted({row for row in rows if row < numel})
