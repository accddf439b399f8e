"""The exchange of momenta instead of gradients, for optimizers of the 1-bit family.

Gradients are not reduced. At the update all ranks first agree that every gradient is finite. Then each adds its
gradient to the common momentum, the compressed all-reduce (``comm.codecs.one_bit``) averages these momenta, and the
update reads the result in the place of the gradient. So a
skipped step leaves momentum and errors as they were. Gradients are clipped before they enter the momentum, by one
factor on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import override

from deepspeed.comm.base.codec import CHUNK, DEVICE_ELEMENTS
from deepspeed.comm.codecs.one_bit import one_bit_nbytes, padded_numel
from deepspeed.comm.codecs.table import WholeSignCodec, unpack_signs
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.ops.onebit.phases import ExchangesMomentum, Phase, mask_of
from deepspeed.zero.gradient.gradient_sum import clip_factor, gradient_factor
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.onebit.bucket_momentum import BucketMomentum
from deepspeed.zero.tiling.formula import MemoryFormula
from deepspeed.zero.update.driver import (
    ERROR_FEEDBACK,
    ExchangeResult,
    MeanGradient,
    PrivateState,
    UpdateParts,
)


class MomentumExchange(MeanGradient):
    """Exchanges momenta, coded in one bit for each element; in the optimizer's warm-up gradients are reduced."""

    reported_codec = WholeSignCodec()
    has_warm_up = True
    reads_mean_gradients = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        _check_groups(optimizer)
        self._optimizer = optimizer
        self._is_collected = False
        self._updates = 0
        self.buckets: list[BucketMomentum] = []  # one for each master, in their order

    @override
    def open(self, parts: UpdateParts) -> None:
        super().open(parts)
        self._grow()

    def _grow(self) -> None:
        for master in self._masters[len(self.buckets) :]:
            self.buckets.append(BucketMomentum(self._optimizer, master, self._memory_tracker))

    @override
    def begin_update(self, before: int) -> None:
        super().begin_update(before)
        optimizer = self._optimizer
        assert isinstance(optimizer, ExchangesMomentum)
        self._updates = before
        former = optimizer.phase
        optimizer.begin_update(before)
        logs = self._groups.job.rank == 0
        optimizer.reminder.note(before, logs=logs)
        if optimizer.phase is not former:
            log_dist(f"update {before + 1}: {type(optimizer).__name__}: {self._line(optimizer.phase)}")
        self._reducer.keeps_own = optimizer.phase is not Phase.WARM_UP

    def _line(self, phase: Phase) -> str:
        """Returns a log line about a phase, with the bits per element and the bytes that this rank sends."""
        plain = coded = 0
        for bucket in self.buckets:
            size = bucket.master.bucket.group.reduce.size
            if size > 1:
                plain += 2 * 2 * bucket.numel * (size - 1) // size
                coded += one_bit_nbytes(bucket.numel, size)
        if phase is Phase.WARM_UP:
            return "gradients are reduced uncompressed"
        if not coded:
            return "nothing is sent, since there is one data-parallel rank"
        what = "momentum is sent" if phase is Phase.MOMENTUM else "ranks make local steps; their movements are sent"
        return (
            f"{what} in 1 bit per element, {coded:,} bytes sent by each rank and exchange, {plain / coded:.1f} "
            "times fewer than gradients in 16 bits"
        )

    @override
    def end(self) -> None:
        assert isinstance(self._optimizer, ExchangesMomentum)
        self._optimizer.reminder()

    @override
    def restart(self) -> None:
        self._is_collected = False  # whether the replicated momentum is up to date

    @override
    def exchange(self, norm: float, used: list[list[bool]], *, scale: float, clip_grad: float) -> ExchangeResult:
        """Averages the momenta of all ranks into the place where the update reads gradients. Every rank must call it.

        The norm is that of the mean gradient before clipping, within 2 % (:class:`Sketch`).
        """
        if not self._reducer.keeps_own:
            return ExchangeResult(norm, gradient_factor(norm, scale=scale, clip_grad=clip_grad), used)
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
        return ExchangeResult(norm, None, used)

    def _norm_of_mean(self, gradients: Sequence[tuple[BucketMomentum, torch.Tensor | None, float]]) -> float:
        """Returns the norm of the mean over ranks of gradients times their multipliers, within 2 %."""
        entries = [
            (bucket.master.bucket.group, bucket.master.layout.numel, gradient, factor)
            for bucket, gradient, factor in gradients
        ]
        return self._root([sketch.squares() for sketch in sketches(entries, self._updates)])

    def _root(self, squares: Sequence[float]) -> float:
        """Returns the root of the sum over all ranks of the job. Every rank must call it."""
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


BINS = 4096
"""Numbers that stand for a gradient, fp32; a divisor of ``CHUNK`` and of ``DEVICE_ELEMENTS``."""


class Sketch:
    """Estimates the norm of one group's mean gradient by a count sketch, since no rank has that gradient.

    Clipping needs that norm. The ranks' own norms are larger by up to the root of the number of ranks, as noise does
    not cancel in them. The codec's output is dominated by its error, as a new gradient is a tenth of the momentum.
    So elements get random signs and are summed into :data:`BINS` bins, the same way on all ranks. That is linear:
    the mean of the ranks' sketches is the sketch of the mean, and the expectation of its squared norm is that of the
    mean, with a relative deviation of ``sqrt(2 / BINS)`` (2 %), or none with no more elements than bins.
    """

    def __init__(self, group: BucketGroup, seed: int) -> None:
        self.group = group
        self._seed = seed
        self._numel = 0
        self._sums = torch.zeros(BINS)

    def add(self, numel: int, gradient: torch.Tensor | None, factor: float) -> None:
        """Adds a buffer; every rank of the group must add those of equal lengths in the same order.

        Args:
            gradient: 1-D, floating; None: zeros.
        """
        place, self._numel = self._numel, self._numel + numel
        if gradient is None:
            return
        random: torch.Generator | None = None
        if not gradient.is_meta:  # in a plan there are no values
            random = torch.Generator(gradient.device).manual_seed(self._seed * 1_000_003 + place)
        sums = torch.zeros(BINS, device=gradient.device)
        at_once = CHUNK if gradient.device.type == "cpu" else DEVICE_ELEMENTS
        for start in range(0, numel, at_once):
            part = gradient[start : start + at_once]
            length = -(-part.numel() // BINS) * BINS
            bits = torch.randint(0, 256, (length // 8,), dtype=torch.uint8, device=part.device, generator=random)
            signed = torch.zeros(length, device=part.device)
            signed[: part.numel()].copy_(part)
            signed = torch.where(unpack_signs(bits), signed, -signed)
            sums += signed.view(-1, BINS).sum(0)
        self._sums += sums.cpu().mul_(factor).roll(place)  # rotated, so that small buffers use different bins

    def squares(self) -> float:
        """Returns this rank's summand of the job's sum of squares of the mean. Every rank of the group must call it."""
        rows = self.group.reduce.gather_small(self._sums, channel="step", label="the norm of the mean gradient")
        if not self.group.is_primary_replica or self.group.place != 0:
            return 0.0
        return rows.double().mean(0).square_().sum().item()


def sketches(entries: Sequence[tuple[BucketGroup, int, torch.Tensor | None, float]], seed: int) -> list[Sketch]:
    """Returns one sketch for each group.

    Args:
        entries: For each bucket its group and what :meth:`Sketch.add` takes: elements, gradient (1-D or None), factor.
            The order is the same on all ranks.
        seed: The seed of the random signs; equal on all ranks, and another one at every update.
    """
    found: dict[int, Sketch] = {}
    for group, numel, gradient, factor in entries:
        sketch = found.setdefault(id(group), Sketch(group, seed))
        sketch.add(numel, gradient, factor)
    return list(found.values())


def _check_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raises DeepSpeedConfigError for a param group with an option or a mask that the exchange does not support."""
    name = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        if group.get("non_freeze"):
            raise DeepSpeedConfigError(
                f"optimizer {name}: param group {number} has non_freeze, which does not exist here; leave it out"
            )
        for parameter in group["params"] if group.get("exp_avg_mask") is not None else ():
            mask_of(group, parameter.numel(), f"a parameter of param group {number}")
