"""The exchange of momenta: what travels of optimizers of the 1-bit family in the place of gradients.

A rank's gradients stay its own until the update. Then all ranks agree that every one of them is finite, and only then
anything changes: each adds its gradient to the momentum that all have, the compressed all-reduce (``comm.one_bit``)
makes one momentum of them, and the update reads that where it else reads the gradient. What travels divided by the root
of the variance is bounded by what Adam could move (``ops.onebit.phases.largest_update``). So a skipped step leaves
momentum and errors as they were. Gradients are clipped before they enter the momentum, by one factor on all ranks.

The momentum must be whole where it is sent. Where masters are sharded it is kept once more for that, replicated, beside
the parts that belong to the optimizer's state; these are what a checkpoint has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from deepspeed.comm.codec import Residual
from deepspeed.comm.one_bit import Limits, OneBitExchange, one_bit_nbytes, padded_numel
from deepspeed.comm.transport import LocalTransport, transfer_key
from deepspeed.logging import log_dist
from deepspeed.ops.onebit.phases import ExchangesMomentum, Phase, frozen_root, largest_update, mask_of
from deepspeed.zero.gradient_bucket import GradientBucket
from deepspeed.zero.group import Groups
from deepspeed.zero.masters import MasterBucket
from deepspeed.zero.onebit.mean_norm import sketches
from deepspeed.zero.storage import FlatBuffer, Kind, Ledger

_MOMENTUM = 3  # kind of transfer, see transfer_key


@dataclass(frozen=True)
class _Tensor:
    """One tensor of a message: its tile, its first element in the message, and how many it has."""

    tile: int
    start: int
    numel: int

    @property
    def place(self) -> slice:
        """Where it lies in the message."""
        return slice(self.start, self.start + self.numel)


class BucketMomentum:
    """The momentum of one bucket on its way: a message of the trained tensors one after the other, without padding.

    Attributes:
        master: Whose.
        private: The errors of this rank, 1-D fp32: of what it sends, then of the slice that it sums.
        momentum: The whole momentum as of the last update, in the order of the message; None where the optimizer's
            state has all of it.
        root: In the same case, what momentum is divided by before it travels; None where it travels as it is.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, master: MasterBucket, ledger: Ledger) -> None:
        self.master = master
        self._optimizer = optimizer
        self._wire = master.bucket.group.reduce
        layout = master.layout
        trained = [tile for tile, one in enumerate(layout.tiles) if one.param_group >= 0 and one.numel]
        ends = [0]
        for tile in trained:
            ends.append(ends[-1] + layout.tiles[tile].numel)
        self._tensors = [_Tensor(tile, *span) for tile, span in zip(trained, _spans(ends), strict=True)]
        self.numel = ends[-1]
        size = self._wire.size
        padded = padded_numel(self.numel, size)
        self.private: FlatBuffer | None = None
        if not isinstance(self._wire, LocalTransport):
            self.private = self._buffer(padded + padded // size, ledger)
            self._error = Residual(self.private.tensor[:padded], self.private.tensor[padded:])
        else:
            nothing = torch.zeros(0, device=master.bucket.device)
            self._error = Residual(nothing, nothing)
        self._padded = padded
        assert isinstance(optimizer, ExchangesMomentum)
        self.momentum = self._buffer(padded, ledger) if master.is_sharded else None
        self.root: FlatBuffer | None = None
        if master.is_sharded and optimizer.precondition and self.private is not None:
            self.root = self._buffer(padded, ledger)
        self._mask: torch.Tensor | None = None
        self._message: torch.Tensor | None = None
        self._unit: torch.Tensor | None = None  # of what is on its way
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._flags: list[bool] = []
        self._work: OneBitExchange | None = None
        self.rounds = 0

    def _buffer(self, numel: int, ledger: Ledger) -> FlatBuffer:
        made = FlatBuffer(numel, torch.float32, self.master.bucket.device, kind=Kind.PRIVATE, ledger=ledger)
        made.tensor.zero_()
        return made

    def _beta(self, tensor: _Tensor) -> float:
        group = self.master.layout.tiles[tensor.tile].param_group
        return float(self._optimizer.param_groups[group]["betas"][0])

    def _coefficient(self, tensor: _Tensor) -> float:
        assert isinstance(self._optimizer, ExchangesMomentum)
        return self._optimizer.coefficient(self.master.layout.tiles[tensor.tile].name)

    # -- the momentum that all ranks have ------------------------------------------------------------------------------

    def collect(self) -> None:
        """Makes the replicated momentum whole from the parts in the ranks' optimizer states; a collective."""
        if self.momentum is not None:
            self._gather("exp_avg", self.momentum.tensor)
        if self.root is not None:
            self._gather("exp_avg_sq", self.root.tensor)
            self._make_root(self.root.tensor)

    def _gather(self, key: str, out: torch.Tensor) -> None:
        """The whole of a state, in the order of the message."""
        master, layout = self.master, self.master.layout
        flat = torch.zeros(layout.numel, device=out.device)
        lower = layout.slice_bounds(master.rank)[0]
        for run in master.runs:
            state = self._optimizer.state.get(run.param) or {}
            if key in state:
                flat[lower + run.span.start : lower + run.span.stop] = state[key].view(-1)
        self.rounds += 1
        owners = master.transport
        owners.all_gather(flat, key=self._key(owners.owner), label=f"the momentum of {master.bucket.label}").wait()
        for tensor in self._tensors:
            start = layout.starts[tensor.tile]
            out[tensor.place] = flat[start : start + tensor.numel]

    @property
    def error_kind(self) -> str:
        """What errors are of, for checkpoints: those in another unit are of no use."""
        assert isinstance(self._optimizer, ExchangesMomentum)
        return "update" if self._optimizer.precondition else "momentum"

    def _make_root(self, variance: torch.Tensor) -> None:
        """Of a variance in the order of the message, what momentum is divided by; infinite where nothing moves."""
        frozen_root(variance, out=variance)
        for tensor in self._tensors:
            group = self._optimizer.param_groups[self.master.layout.tiles[tensor.tile].param_group]
            variance[tensor.place].add_(float(group["eps"]))

    def find_root(self) -> torch.Tensor | None:
        """What the message is divided by before it travels; None: it travels as it is. Do not change it."""
        assert isinstance(self._optimizer, ExchangesMomentum)
        if not self._optimizer.precondition:
            return None
        if self.root is not None:
            return self.root.tensor
        made = torch.zeros(self._padded, dtype=torch.float32, device=self.master.bucket.device)
        found = self.of_states("exp_avg_sq")
        for tensor in self._tensors:
            if tensor.tile in found:
                made[tensor.place] = found[tensor.tile]
        self._make_root(made)
        return made

    def _limits(self, rates: Sequence[float] | None) -> Limits:
        """What elements may be at most in that unit, for a message with so much of the learning rate in it."""
        found: list[tuple[int, int, float]] = []
        for tensor in self._tensors:
            group = self.master.layout.tiles[tensor.tile].param_group
            limit = largest_update(self._optimizer.param_groups[group]["betas"]) * (rates[group] if rates else 1.0)
            start, stop = tensor.start, tensor.start + tensor.numel
            if found and found[-1][2] == limit:
                start = found.pop()[0]
            found.append((start, stop, limit))
        return found

    def rescale(self, factor: torch.Tensor) -> None:
        """The unit of what travels changes; so do the errors. ``factor`` is as long as the message."""
        if self.private is not None:
            assert self._error.owned is not None
            self._error.sent.mul_(factor)
            self._error.owned.mul_(self._wire.my_slice(factor))

    def _key(self, owner: int) -> int:
        return transfer_key(owner, self.master.bucket.index, _MOMENTUM, self.rounds)

    def _old(self) -> list[torch.Tensor | None]:
        """The momentum of each tensor of the message before this update; None: there was no update yet."""
        if self.momentum is not None:
            return [self.momentum.tensor[tensor.place] for tensor in self._tensors]
        found = self.of_states("exp_avg")
        return [found.get(tensor.tile) for tensor in self._tensors]

    def of_states(self, key: str) -> dict[int, torch.Tensor]:
        """Views of a per-element state by tile, where masters are not cut; without those that were never updated."""
        found: dict[int, torch.Tensor] = {}
        for run in self.master.runs:
            state = self._optimizer.state.get(run.param) or {}
            if key in state:
                for tile, start, _ in self.master.tile_spans(run.span):
                    offset = start - run.span.start
                    numel = self.master.layout.tiles[tile].numel
                    found[tile] = state[key].view(-1)[offset : offset + numel]
        return found

    def place_of(self, tile: int) -> slice | None:
        """Where a tile lies in the message."""
        return next((tensor.place for tensor in self._tensors if tensor.tile == tile), None)

    # -- one update ----------------------------------------------------------------------------------------------------

    def start(
        self,
        gradient: torch.Tensor | None,
        factor: float,
        flags: list[bool],
        *,
        multiply: Sequence[float] | None = None,
        add: Mapping[int, torch.Tensor] | None = None,
        only_added: Collection[int] = (),
        rates: Sequence[float] | None = None,
    ) -> None:
        """Sends this rank's momentum.

        Args:
            gradient: 1-D, the whole bucket, this rank's own; None: it has none, which counts as zeros.
            factor: Multiplier of the gradient.
            flags: Per tile, whether any rank has a gradient of it; the others stay as they are.
            multiply: By param group, what it is multiplied by before it travels.
            add: By tile, what is added then.
            only_added: Tiles of which nothing else travels.
            rates: By param group, the sum of the learning rates that what travels has in it; None: momentum has none.
        """
        device = self.master.bucket.device
        self._flags = flags
        message = self._message = torch.zeros(self._padded, dtype=torch.float32, device=device)
        sent, owned = self._error.sent, self._error.owned
        assert owned is not None
        first = self._wire.rank * owned.numel()
        self._kept = []
        for tensor, old in zip(self._tensors, self._old(), strict=True):
            part = message[tensor.place]
            if not flags[tensor.tile]:
                # It takes no part: its errors are put back, and meanwhile it is zeros.
                lower, upper = max(tensor.start - first, 0), min(tensor.start + tensor.numel - first, owned.numel())
                for errors in (sent[tensor.place], owned[lower : max(lower, upper)]):
                    self._kept.append((errors, errors.clone()))
                    errors.zero_()
                continue
            if tensor.tile in only_added:
                assert add is not None
                part.copy_(add[tensor.tile])
                continue
            beta = self._beta(tensor)
            if gradient is not None:
                start = self.master.layout.starts[tensor.tile]
                part.copy_(gradient[start : start + tensor.numel]).mul_((1 - beta) * factor)
            if old is not None:
                part.add_(old, alpha=beta)
            coefficient = self._coefficient(tensor)
            if coefficient != 1.0:
                part.mul_(coefficient)
            if multiply is not None:
                part.mul_(multiply[self.master.layout.tiles[tensor.tile].param_group])
            if add is not None:
                part.add_(add[tensor.tile])
        self._launch(message, rates)

    def take(self) -> torch.Tensor:
        """What has come, in the order of the message; it is given up."""
        assert self._message is not None
        message, self._message = self._message, None
        return message

    def divide(self, by: Sequence[float]) -> None:
        """Divides what has come, by param group."""
        assert self._message is not None
        for tensor in self._tensors:
            self._message[tensor.place].div_(by[self.master.layout.tiles[tensor.tile].param_group])

    def _launch(self, message: torch.Tensor, rates: Sequence[float] | None) -> None:
        self._apply_mask(message)
        self._unit = self.find_root()
        limits: Limits = ()
        if self._unit is not None:
            message.div_(self._unit)
            limits = self._limits(rates)
        self.rounds += 1
        label = f"the momentum of {self.master.bucket.label}"
        self._work = OneBitExchange(
            self._wire, message, self.numel, self._error, key=self._key(self._wire.owner), label=label, limits=limits
        )

    def finish(self) -> None:
        """Waits; from then on there is the momentum that all ranks agree on."""
        assert self._work is not None and self._message is not None
        self._work.finish()
        self._work = None
        if self._unit is not None:
            self._message.mul_(self._unit.masked_fill(self._unit.isinf(), 0.0))
            self._unit = None
        self._apply_mask(self._message)
        mask = self._find_mask()
        if mask is not None and self.private is not None:
            assert self._error.owned is not None
            self._error.sent.mul_(mask)
            self._error.owned.mul_(self._wire.my_slice(mask))
        for tensor in self._tensors:
            coefficient = self._coefficient(tensor)
            if coefficient != 1.0:
                self._message[tensor.place].div_(coefficient)
        for errors, before in self._kept:
            errors.copy_(before)
        self._kept = []

    def _apply_mask(self, message: torch.Tensor) -> None:
        mask = self._find_mask()
        if mask is not None:
            message.mul_(mask)

    def _find_mask(self) -> torch.Tensor | None:
        """1 where momentum may be, as long as the message; None: everywhere."""
        layout, groups = self.master.layout, self._optimizer.param_groups
        if not any(group.get("exp_avg_mask") is not None for group in groups):
            return None
        if self._mask is None:
            self._mask = torch.ones(self._padded, device=self.master.bucket.device)
            for tensor in self._tensors:
                tile = layout.tiles[tensor.tile]
                mask = mask_of(groups[tile.param_group], tensor.numel, tile.name)
                if mask is not None:
                    self._mask[tensor.place] = mask.to(self._mask)
        return self._mask

    def settle(self, gradients: GradientBucket) -> None:
        """Keeps what has come, and puts it where the update reads the gradient, which is that of the bucket."""
        assert self._message is not None
        message, self._message = self._message, None
        for tensor, old in zip(self._tensors, self._old(), strict=True):
            if not self._flags[tensor.tile] and old is not None:
                message[tensor.place] = old
        starts = {tensor.tile: tensor.start for tensor in self._tensors}
        made = gradients.new_result(self.master.flat.numel())
        result = made.tensor
        for fragment in self.master.fragments:
            if fragment.tile in starts:
                start = starts[fragment.tile] + fragment.tile_start
                result[fragment.in_slice] = message[start : start + fragment.numel]
        gradients.sum.add_reduced(made)
        if self.momentum is not None:
            self.momentum.tensor.copy_(message)


def clip_factor(norm: float, limit: float, epsilon: float) -> float:
    """Of the gradients, so that a norm of at most ``limit`` (0: any) is left."""
    return min(1.0, limit / (norm + epsilon)) if limit > 0 else 1.0


def _spans(ends: Sequence[int]) -> list[tuple[int, int]]:
    return [(start, stop - start) for start, stop in pairwise(ends)]


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
