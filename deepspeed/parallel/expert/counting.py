"""How many routes go to each expert, counted where the routes are."""

from __future__ import annotations

import torch


def count_each(values: torch.Tensor, size: int) -> torch.Tensor:
    """Returns how often each of 0 ... ``size`` - 1 occurs in ``values``: ``[size]`` int64 on their device.

    ``torch.bincount`` would do the same, but on a GPU the host waits for the smallest and the largest value.

    Args:
        values: ``[R]`` int64, all in the range.
        size: Of the range.
    """
    return values.new_zeros(size).scatter_add_(0, values, torch.ones_like(values))
