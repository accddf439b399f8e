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
from typing_extensions import override

from deepspeed.comm.codecs.one_bit import one_bit_nbytes, padded_numel
from deepspeed.comm.codecs.table import WholeSignCodec
from deepspeed.config.sections.root import Root
from deepspeed.logging import log_dist
from deepspeed.ops.onebit.phases import ExchangesMomentum, Phase
from deepspeed.zero.onebit.bucket_momentum import BucketMomentum
from deepspeed.zero.onebit.mean_norm import sketches
from deepspeed.zero.onebit.refusals import refuse_combinations
from deepspeed.zero.placement import Placement
from deepspeed.zero.tiling.formula import MemoryFormula
from deepspeed.zero.update.driver import (
    ERROR_FEEDBACK,
    Exchanged,
    MeanGradient,
    PrivateState,
    UpdateParts,
    clip_factor,
)


class MomentumExchange(MeanGradient):
    """Exchanges momenta, coded in one bit for each element; in the optimizer's warm-up gradients are reduced.

    Attributes:
        buckets: One for each master, in their order.

    Args:
        optimizer: Of the 1-bit family.
    """

    codec = WholeSignCodec()
    has_warm_up = True

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_collected = False
        self._updates = 0
        self.buckets: list[BucketMomentum] = []

    @override
    def refuse(self, root: Root, placement: Placement) -> None:
        refuse_combinations(root, placement, self._optimizer)

    @override
    def open(self, parts: UpdateParts) -> None:
        super().open(parts)
        self._grow()

    def _grow(self) -> None:
        for master in self._masters[len(self.buckets) :]:
            self.buckets.append(BucketMomentum(self._optimizer, master, self._ledger))

    @override
    def begin_update(self, before: int) -> None:
        super().begin_update(before)
        optimizer = self._optimizer
        assert isinstance(optimizer, ExchangesMomentum)
        self._updates = before
        former = optimizer.phase
        optimizer.begin_update(before)
        speaks = self._groups.job.rank == 0
        optimizer.reminder.note(before, speaks=speaks)
        if optimizer.phase is not former:
            log_dist(f"update {before + 1}: {type(optimizer).__name__}: {self._line(optimizer.phase)}")
        self._reducer.keeps_own = optimizer.phase is not Phase.WARM_UP

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

    @override
    def end(self) -> None:
        assert isinstance(self._optimizer, ExchangesMomentum)
        self._optimizer.reminder()

    @override
    def restart(self) -> None:
        self._is_collected = False  # what is replicated of the optimizer's states

    @override
    def exchange(self, norm: float, used: list[list[bool]], *, scale: float, clip_grad: float) -> Exchanged:
        """Puts one momentum, made of those of all ranks, where the update reads gradients. Every rank must call it.

        The norm is that of the mean gradient before clipping, within 2 % (``zero.onebit.mean_norm``).
        """
        if not self._reducer.keeps_own:
            return super().exchange(norm, used, scale=scale, clip_grad=clip_grad)
        self._grow()
        if not self._is_collected:
            for bucket in self.buckets:
                bucket.collect()
            self._is_collected = True
        work = []
        for bucket, own, flags in zip(self.buckets, self._reducer.buckets, used, strict=True):
            if any(flags):
                work.append((bucket, own, flags, *own.take_own_sum()))
        norm = self._norm_of_mean(
            [(bucket, None if total is None else total.tensor, factor / scale) for bucket, _, _, total, factor in work]
        )
        clip = clip_factor(norm, clip_grad)
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
        return Exchanged(norm, None, used)

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

    @override
    def private_states(self) -> Sequence[PrivateState]:
        return [
            *super().private_states(),
            *(
                PrivateState(bucket.error_kind, bucket.master.bucket.layout, bucket.private.tensor, ERROR_FEEDBACK)
                for bucket in self.buckets
                if bucket.private is not None
            ),
        ]

    @override
    def private_formula(self, formula: MemoryFormula) -> Sequence[tuple[int, str]]:
        """Errors and, beside parts of the masters, what a sender needs whole."""
        assert isinstance(self._optimizer, ExchangesMomentum)
        total, whole = 0, (1 + self._optimizer.precondition) if formula.placement.shard_master else 0
        for bucket in formula.trained_buckets:
            if bucket.num_slices > 1:
                numel = padded_numel(bucket.trained_numel, bucket.num_slices)
                total += 4 * (numel + numel // bucket.num_slices + whole * numel)
        return [(total, f"4 x ({1 + whole} Psi + Psi / N)" if whole else "4 x (Psi + Psi / N)")]
