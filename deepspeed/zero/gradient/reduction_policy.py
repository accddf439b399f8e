"""The settings of gradient reduction, which every bucket of an engine shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ReductionPolicy:
    """Holds the settings of gradient reduction."""

    every_micro_batch: bool  # reduce after each micro-batch, not only at the boundary: at stages 2 and 3
    to_owner: bool  # the owner of a slice gets its sum, from stage 1 on; otherwise every rank gets everything
    reduce_dtype: Callable[[torch.dtype], torch.dtype]  # dtype in which gradients are sent, per compute dtype
    accumulate_dtype: torch.dtype  # dtype of the sum over micro-batches
    reduces_sums_narrow: bool  # reduce that sum in ``reduce_dtype`` too (``communication_data_type`` is given)
    # round what the update reads to ``accumulate_dtype``; parameters with a wider dtype keep theirs
    narrows: bool = False
    is_mean: bool = True  # whether the sum over ranks is divided by the divisor of the bucket's group
    divides_first: bool = False  # divide a gradient before it is sent (``prescale_gradients``)
    # what a gradient is divided by before it is sent; the rest of the division follows (``gradient_predivide_factor``)
    predivide: float = 1.0
    bucket_numel: int = 500_000_000  # most elements in one reduction (``reduce_bucket_size``)
    overlap: bool = True  # start reducing during backward
    allow_unused: bool = True  # tolerate a parameter without gradient at the update (``ignore_unused_parameters``)
    may_skip: bool = False  # an update may be skipped for a gradient that is not finite, and then must change nothing
    codes_from: int = 0  # number of first updates whose gradients are sent without the groups' ``reduce_codec``
    is_trial: bool = False  # then alternate between both ways and keep the faster one
    forget_every: int = 0  # clear the error feedback of all buckets every this many updates; 0: never

    @property
    def begins_coded(self) -> bool:
        """Returns whether the first update's gradients are sent with codecs."""
        return self.codes_from == 0 and not self.is_trial

    def factors(self, divisor: int) -> tuple[float, float]:
        """Returns the factors on a gradient before it is sent, and on the sum over ranks."""
        mean = 1.0 / divisor if self.is_mean else 1.0
        before = mean if self.divides_first else 1.0 / self.predivide
        return before, mean / before
