"""How gradients are combined: what an engine decides once, for all of its buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReductionPolicy:
    """How gradients are combined.

    Attributes:
        every_micro_batch: Reduce after each micro-batch (sharded gradients), not only at the boundary.
        to_owner: The owner of a slice gets its sum; otherwise everybody gets everything.
        reduce_dtype: Dtype on the wire, per compute dtype.
        accumulate_dtype: Dtype of the sum over micro-batches.
        sums_travel_as_gradients: Reduce that sum in ``reduce_dtype`` too (``communication_data_type`` is given).
        is_mean: Whether the sum over ranks is divided by the divisor of the bucket's group.
        divides_first: Divide a gradient before it travels (``prescale_gradients``).
        predivide: What a gradient is divided by before it travels; the rest of the division follows
            (``gradient_predivide_factor``).
        bucket_numel: Most elements in one reduction (``reduce_bucket_size``).
        overlap: Start reducing during backward.
        allow_unused: Tolerate a parameter without gradient at the update (``ignore_unused_parameters``).
        may_skip: An update may be skipped for a gradient that is not finite, and then leaves everything as it was.
        codes_from: Updates before those whose gradients travel as the codecs of their groups say.
        is_trial: From then on both ways take turns, and the faster one stays.
        forget_every: Updates after which what codes have lost is forgotten, of all buckets at once; 0: never.
    """

    every_micro_batch: bool
    to_owner: bool
    reduce_dtype: Callable[[torch.dtype], torch.dtype]
    accumulate_dtype: torch.dtype
    sums_travel_as_gradients: bool
    is_mean: bool = True
    divides_first: bool = False
    predivide: float = 1.0
    bucket_numel: int = 500_000_000
    overlap: bool = True
    allow_unused: bool = True
    may_skip: bool = False
    codes_from: int = 0
    is_trial: bool = False
    forget_every: int = 0

    @property
    def begins_coded(self) -> bool:
        """Whether the first update's gradients travel as codecs say."""
        return self.codes_from == 0 and not self.is_trial

    def factors(self, divisor: int) -> tuple[float, float]:
        """The factors on a gradient before it travels, and on the sum over ranks.

        Args:
            divisor: Of the bucket's group.
        """
        mean = 1.0 / divisor if self.is_mean else 1.0
        before = mean if self.divides_first else 1.0 / self.predivide
        return before, mean / before
