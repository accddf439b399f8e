"""The settings of gradient reduction, which every bucket of an engine shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReductionPolicy:
    """Holds the settings of gradient reduction.

    Attributes:
        every_micro_batch: Reduce after each micro-batch, not only at the boundary: at stages 2 and 3.
        to_owner: The owner of a slice gets its sum, from stage 1 on; otherwise every rank gets everything.
        reduce_dtype: Dtype in which gradients are sent, per compute dtype.
        accumulate_dtype: Dtype of the sum over micro-batches.
        reduces_sums_narrow: Reduce that sum in ``reduce_dtype`` too (``communication_data_type`` is given).
        narrows: Round what the update reads to ``accumulate_dtype``; parameters with a wider dtype keep theirs.
        is_mean: Whether the sum over ranks is divided by the divisor of the bucket's group.
        divides_first: Divide a gradient before it is sent (``prescale_gradients``).
        predivide: What a gradient is divided by before it is sent; the rest of the division follows
            (``gradient_predivide_factor``).
        bucket_numel: Most elements in one reduction (``reduce_bucket_size``).
        overlap: Start reducing during backward.
        allow_unused: Tolerate a parameter without gradient at the update (``ignore_unused_parameters``).
        may_skip: An update may be skipped for a gradient that is not finite, and then must change nothing.
        codes_from: Number of first updates whose gradients are sent without the groups' ``reduce_codec``.
        is_trial: Then alternate between both ways and keep the faster one.
        forget_every: Clear the error feedback of all buckets every this many updates; 0: never.
    """

    every_micro_batch: bool
    to_owner: bool
    reduce_dtype: Callable[[torch.dtype], torch.dtype]
    accumulate_dtype: torch.dtype
    reduces_sums_narrow: bool
    narrows: bool = False
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
        """Returns whether the first update's gradients are sent with codecs."""
        return self.codes_from == 0 and not self.is_trial

    def factors(self, divisor: int) -> tuple[float, float]:
        """Returns the factors on a gradient before it is sent, and on the sum over ranks.

        Args:
            divisor: The divisor of the bucket's group.
        """
        mean = 1.0 / divisor if self.is_mean else 1.0
        before = mean if self.divides_first else 1.0 / self.predivide
        return before, mean / before
