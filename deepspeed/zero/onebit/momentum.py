"""The exchange of momenta: what travels of optimizers of the 1-bit family in the place of gradients.

A rank's gradients stay its own until the update. Then all ranks agree that every one of them is finite, and only then
anything changes: each adds its gradient to the momentum that all have, the compressed all-reduce
(``comm.codecs.one_bit``) makes one momentum of them, and the update reads that where it else reads the gradient. So a
skipped step leaves momentum and errors as they were. Gradients are clipped before they enter the momentum, by one
factor on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepspeed.comm.codecs.one_bit import one_bit_nbytes
from deepspeed.logging import log_dist
from deepspeed.ops.onebit.phases import ExchangesMomentum, Phase
from deepspeed.zero.gradient.gradient_bucket import GradientBucket
from deepspeed.zero.group import Groups
from deepspeed.zero.onebit.bucket_momentum import BucketMomentum
from deepspeed.zero.onebit.mean_norm import sketches
from deepspeed.zero.storage import Ledger
from deepspeed.zero.update.masters import MasterBucket


def clip_factor(norm: float, limit: float, epsilon: float) -> float:
    """Of the gradients, so that a norm of at most ``limit`` (0: any) is left."""
    return min(1.0, limit / (norm + epsilon)) if limit > 0 else 1.0


class MomentumExchange:
    """The momenta of all buckets of an engine.

    Attributes:
        buckets: One for each master, in their order.

    Args:
        optimizer: Of the 1-bit family.
        masters: All of this rank; the list may grow.
        groups: The ranks that decide together.
        ledger: Books of the memory.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: list[MasterBucket], groups: Groups, ledger: Ledger
    ) -> None:
        self._optimizer = optimizer
        self._masters = masters
        self._groups = groups
        self._ledger = ledger
        self._is_collected = False
        self._updates = 0
        self.buckets: list[BucketMomentum] = []
        self._grow()

    def _grow(self) -> None:
        for master in self._masters[len(self.buckets) :]:
            self.buckets.append(BucketMomentum(self._optimizer, master, self._ledger))

    def begin_update(self, before: int) -> bool:
        """Whether momentum travels in the next update, so that gradients are held back until then.

        Args:
            before: Updates so far; equal on all ranks.
        """
        optimizer = self._optimizer
        assert isinstance(optimizer, ExchangesMomentum)
        self._updates = before
        former = optimizer.phase
        optimizer.begin_update(before)
        speaks = self._groups.job.rank == 0
        optimizer.reminder.note(before, speaks=speaks)
        if optimizer.phase is not former:
            log_dist(f"update {before + 1}: {type(optimizer).__name__}: {self._line(optimizer.phase)}")
        return optimizer.phase is not Phase.WARM_UP

    def _line(self, phase: Phase) -> str:
        """What changes, in bits and bytes of this rank."""
        plain = coded = 0
        for bucket in self.buckets:
            size = bucket.master.bucket.group.reduce.size
            if size > 1:
                plain += 2 * 2 * bucket.numel * (size - 1) // size
                coded += one_bit_nbytes(bucket.numel, size)
        if phase is Phase.WARM_UP:
            return "gradients are reduced as they are"
        if not coded:
            return "nothing travels, as there is one data rank"
        what = (
            "momentum travels" if phase is Phase.MOMENTUM else "ranks take steps of their own; what they moved travels"
        )
        return (
            f"{what} in 1 bit for each element, {coded:,} bytes sent by each rank and exchange, {plain / coded:.1f} "
            "times fewer than gradients in 16 bits"
        )

    def end(self) -> None:
        """The run is over."""
        assert isinstance(self._optimizer, ExchangesMomentum)
        self._optimizer.reminder()

    def forget(self) -> None:
        """The optimizer's states have been replaced: what is replicated of them is collected anew."""
        self._is_collected = False

    def run(
        self,
        gradients: Sequence[GradientBucket],
        used: list[list[bool]],
        scale: float,
        clip_grad: float,
        epsilon: float,
    ) -> tuple[float, list[list[bool]]]:
        """Makes one momentum of those of all ranks, where the update reads gradients. Every rank must call it.

        Args:
            gradients: By bucket, with the sums of this rank's own gradients.
            used: By bucket and tile, whether any rank has a gradient of it.
            scale: Of the loss.
            clip_grad: Largest norm; 0 for no clipping.
            epsilon: Added to the norm that is divided by.

        Returns:
            The norm of the mean gradient before clipping, within 2 % (``zero.onebit.mean_norm``); and, by bucket and
            tile, of what there is an update now.
        """
        self._grow()
        if not self._is_collected:
            for bucket in self.buckets:
                bucket.collect()
            self._is_collected = True
        work = []
        for bucket, own, flags in zip(self.buckets, gradients, used, strict=True):
            if any(flags):
                work.append((bucket, own, flags, *own.take_own_sum()))
        norm = self._norm_of_mean(
            [(bucket, None if total is None else total.tensor, factor / scale) for bucket, _, _, total, factor in work]
        )
        clip = clip_factor(norm, clip_grad, epsilon)
        before: BucketMomentum | None = None
        for bucket, _, flags, total, factor in work:
            bucket.start(None if total is None else total.tensor, factor / scale * clip, flags)
            if total is not None:
                total.free()
            if before is not None:
                before.finish()
            before = bucket
        if before is not None:
            before.finish()
        for bucket, own, *_ in work:
            bucket.settle(own)
        return norm, used

    def synchronise(self) -> None:
        """Brings ranks together whose weights differ, so that they can be saved; every rank must call it."""

    def _norm_of_mean(self, gradients: Sequence[tuple[BucketMomentum, torch.Tensor | None, float]]) -> float:
        """Of this rank's own gradients, each with its multiplier, the norm of the mean over ranks, within 2 %."""
        entries = [
            (bucket.master.bucket.group, bucket.master.layout.numel, gradient, factor)
            for bucket, gradient, factor in gradients
        ]
        return self._root([sketch.squares() for sketch in sketches(entries, self._updates)])

    def _root(self, squares: Sequence[float]) -> float:
        """Of the sum over the job; every rank must call it."""
        rows = self._groups.job.gather_small(
            torch.tensor([sum(squares)], dtype=torch.float64), channel="step", label="the norm of the gradients"
        )
        return float(rows.sum().sqrt().item())

    def forget_errors(self) -> None:
        """What was lost so far is not made good."""
        for bucket in self.buckets:
            if bucket.private is not None:
                bucket.private.tensor.zero_()
