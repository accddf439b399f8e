"""How gradients are combined: what an engine decides once, for all of its buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepspeed.comm.transport import Transport


@dataclass(frozen=True)
class ReductionPolicy:
    """How gradients are combined.

    Attributes:
        every_micro_batch: Reduce after each micro-batch (sharded gradients), not only at the boundary.
        to_owner: The owner of a slice gets its sum; otherwise everybody gets everything.
        reduce_dtype: Dtype on the wire, per compute dtype.
        accumulate_dtype: Dtype of the sum over micro-batches.
        sums_travel_as_gradients: Reduce that sum in ``reduce_dtype`` too (``communication_data_type`` is given).
        scale: Factor on the sum over ranks (1 / ranks for a mean).
        prescale: Factor on a gradient before it travels (``prescale_gradients``, ``gradient_predivide_factor``).
        bucket_numel: Most elements in one reduction (``reduce_bucket_size``).
        overlap: Start reducing during backward.
        allow_unused: Tolerate a parameter without gradient at the update (``ignore_unused_parameters``).
    """

    every_micro_batch: bool
    to_owner: bool
    reduce_dtype: Callable[[torch.dtype], torch.dtype]
    accumulate_dtype: torch.dtype
    sums_travel_as_gradients: bool
    scale: float
    prescale: float = 1.0
    bucket_numel: int = 500_000_000
    overlap: bool = True
    allow_unused: bool = True


@dataclass(frozen=True)
class Combination:
    """The second step of a sum over a grid of ranks.

    Attributes:
        transport: Of the ranks with the same slices.
        to_owner: Each of them gets its part of the sum; otherwise everybody gets everything.
    """

    transport: Transport
    to_owner: bool
