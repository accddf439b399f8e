"""The whole update: unscale, norm, overflow check, clip, update the runs, publish, clear.

:class:`DeepSpeedZeroOptimizer` has the order of these steps, :class:`StepAgreement` the exchange before them: norm,
flags and checksums of all ranks. Rates, scales and states, which programs read and change between updates, are in
``zero.update.master_optimizer``.

The gradient is multiplied by one fp32 factor (unscaling times clipping) inside the update, at the same point for every
stage, so that the stage never changes the arithmetic.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepspeed.errors import CallOrderError, DivergenceError, NonFiniteError
from deepspeed.logging import log_dist
from deepspeed.ops.base import evaluate, step_hooks
from deepspeed.ops.elementwise import flat_updater
from deepspeed.ops.rounding import NarrowStates
from deepspeed.zero.gather.agreement import Agreement
from deepspeed.zero.gradient.gradient_sum import gradient_factor, norm_from_squares
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.group import Groups
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.storage import MemoryTracker
from deepspeed.zero.update.base_optimizer import refuse_changed_groups
from deepspeed.zero.update.driver import MeanGradient, UpdateDriver, UpdateParts
from deepspeed.zero.update.loop import ChunkUpdater, UpdateStrategy
from deepspeed.zero.update.master_optimizer import MasterOptimizer
from deepspeed.zero.update.masters import MasterBucket, PublishWork
from deepspeed.zero.update.speculation import SpeculativeUpdater

_FLAGS_PER_NUMBER = 48  # bits of an exact integer in fp64
_NAME = 240  # bytes of a parameter's name that are sent


@dataclass
class StepReport:
    """Reports what one update did."""

    norm: float  # unscaled gradient norm before clipping
    overflow: bool  # whether a gradient was not finite; then nothing was changed
    extra: torch.Tensor  # what each rank of the job gave to :meth:`DeepSpeedZeroOptimizer.update`, by rank: 2-D, fp64


class DeepSpeedZeroOptimizer(MasterOptimizer):
    """Drives a torch optimizer over the runs that this rank owns.

    Args:
        optimizer: The torch optimizer; its ``params`` lists hold runs already.
        masters: Master weights by trainable bucket.
        reducer: Where the gradients are.
        placement: The ZeRO row.
        groups: The ranks that share masters, and those that decide together.
        agreement: Source of the order's checksum, compared in every update.
        ledger: Memory tracker: counts the bytes that are allocated.
        loss_scaler: fp16 loss scaler, or None.
        clip_grad: Largest gradient norm, 0 for no clipping.
        max_skipped: Non-finite steps in a row before training stops; 0 = never.
        skip_non_finite: Skip an update with a non-finite gradient (always, in fp16).
        leave_backward: Refuses a call inside a backward, and drops what an exception has left of one.
        before_update: Frees what must not be gathered while parameters change.
        backward: The engine's backward, for ``optimizer.backward(loss)``.
        strategies: How masters of every tier in use are updated.
        driver: Exchanges what the update needs of other ranks; None: :class:`MeanGradient`, for optimizers outside the
            1-bit family.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: list[MasterBucket],
        reducer: GradientReducer,
        *,
        placement: Placement,
        groups: Groups,
        agreement: Agreement,
        ledger: MemoryTracker,
        loss_scaler: Any,
        clip_grad: float,
        max_skipped: int,
        skip_non_finite: bool,
        leave_backward: Callable[[str], None],
        before_update: Callable[[], None],
        backward: Callable[..., Any],
        strategies: Mapping[Tier, UpdateStrategy],
        driver: UpdateDriver | None = None,
    ) -> None:
        flat = flat_updater(optimizer)
        if placement.narrow_states and flat is not None:
            flat = NarrowStates(flat)
        super().__init__(
            optimizer,
            masters,
            reducer,
            groups=groups,
            driver=MeanGradient() if driver is None else driver,
            flat=flat,
            memory_tracker=ledger,
            loss_scaler=loss_scaler,
            leave_backward=leave_backward,
            before_update=before_update,
            backward=backward,
        )
        self.clip_grad = clip_grad
        self.overflow = False
        self.parameter_offload: Any = None
        self.last_report: StepReport | None = None
        self._step_agreement = StepAgreement(masters, reducer, groups, agreement)
        self._max_skipped = max_skipped
        self._skip_non_finite = skip_non_finite
        self._first_skip = ""
        self._cut_for: set[tuple[int, tuple[bool, ...]]] = set()
        self._updater = (
            None if flat is None else ChunkUpdater(flat, optimizer, strategies, rounds=placement.narrow_masters)
        )
        self.driver.open(
            UpdateParts(masters, reducer, groups, ledger, self.carry_user_writes, self.publish_masters),
        )
        self.driver.begin_update(self._steps)
        if placement.speculates and flat is not None and self.driver.reads_mean_gradients:
            self.speculation = SpeculativeUpdater(
                masters,
                reducer,
                flat,
                optimizer,
                strategies=strategies,
                factor=lambda: gradient_factor(0.0, scale=self.loss_scale, clip_grad=0.0),
                memory_tracker=ledger,
            )

    # -- the update --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes the whole update; every rank must call it. A non-finite gradient skips it everywhere.

        Args:
            closure: Recomputes the loss (it must call the engine's backward); evaluated once, before the update.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            CallOrderError: A backward is still open, or a parameter got no gradient and must have one.
            DivergenceError: Ranks kept different orders of collectives.
            NonFiniteError: Too many skipped steps in a row, or an overflow at the minimum loss scale.
        """
        loss = evaluate(closure)
        (self._update_by_losses or self.update)()
        return loss

    @torch.no_grad()
    def update(
        self, extra: Sequence[float] = (), divisor_of: Callable[[torch.Tensor], float] | None = None
    ) -> StepReport:
        """Makes the whole update; every rank must call it. A non-finite gradient skips it everywhere.

        Args:
            extra: Numbers for all ranks of the job; they are gathered together with the gradient's norm. Every rank
                must give as many.
            divisor_of: Returns the divisor of the gradients, besides the loss scale, from the ``extra`` numbers of all
                ranks; None: 1.

        Returns:
            The norm, whether the update was skipped, and the ``extra`` numbers of all ranks.

        Raises:
            CallOrderError: A backward is still open, or a parameter got no gradient and must have one.
            DivergenceError: Ranks kept different orders of collectives.
            NonFiniteError: Too many skipped steps in a row, or an overflow at the minimum loss scale.
        """
        self._leave_backward("optimizer.step")
        refuse_changed_groups(self.optimizer, sum(len(master.runs) for master in self._masters))
        self._reducer.settle()
        self._before_update()
        self._carry_user_writes()
        total, used, rows = self._step_agreement.exchange(extra)
        if not self._reducer.policy.allow_unused:
            self._step_agreement.refuse_unused(used)
        self._steps += 1
        scale = self.loss_scale * (1.0 if divisor_of is None else divisor_of(rows))
        norm = norm_from_squares(total) / scale
        self.overflow = not math.isfinite(total) and (self._skip_non_finite or self.loss_scaler is not None)
        self.last_report = report = StepReport(norm, self.overflow, rows)
        if self.overflow:
            self._skip(self.loss_scale)
        else:
            self._skipped_in_a_row = 0
            if self.driver.reads_mean_gradients:  # nearly every optimizer; without communication
                factor = gradient_factor(norm, scale=scale, clip_grad=self.clip_grad)
            else:
                exchanged = self.driver.exchange(norm, used, scale=scale, clip_grad=self.clip_grad)
                factor, used = exchanged.factor, exchanged.used
                self.last_report = report = StepReport(exchanged.norm, overflow=False, extra=rows)
            self._apply(factor, used)
            self._reducer.commit()
            self._reducer.clear()
        self._reducer.end_update(self.steps)
        self.driver.begin_update(self.steps)
        if not self.overflow:
            self._update_scale(overflow=False)
        self.driver.end_update()
        return report

    def carry_user_writes(self) -> None:
        """Copies users' writes to resident parameters into buckets and masters, as the next step would."""
        self._carry_user_writes()
        for master in self._masters:
            master.bucket.remember_values()

    def _carry_user_writes(self) -> None:
        """Does nothing for sharded parameters, whose writes were kept when they were freed."""
        for position, master in enumerate(self._masters):
            changed = master.bucket.take_back_changes()
            if changed and self.speculation is not None:
                self.speculation.note_write(position)
            for index in changed:
                master.refresh(index)

    def _update_scale(self, *, overflow: bool) -> None:
        if self.loss_scaler is not None:
            before = self.loss_scale
            self.loss_scaler.update_scale(overflow)
            if self.loss_scale != before:
                self._reducer.scale_feedback(self.loss_scale / before)

    def _skip(self, scale: float) -> None:
        rank, name = self._step_agreement.first_offender()
        self._skipped_in_a_row += 1
        what = f"step {self.steps}: the gradient is not finite, first in {name!r} (slice of rank {rank})"
        if self._skipped_in_a_row == 1:
            self._first_skip = what
        self._reducer.clear()
        self._update_scale(overflow=True)
        if self.loss_scaler is not None:
            log_dist(f"{what}; skipped. {self.loss_scaler.describe_change(scale)}")
        else:
            log_dist(f"{what}; skipped, nothing was changed")
        if self._max_skipped and self._skipped_in_a_row >= self._max_skipped:
            raise NonFiniteError(
                f"{self._skipped_in_a_row} steps in a row had gradients that are not finite. The first: "
                f"{self._first_skip}. Lower the learning rate, check that parameter's inputs, or raise "
                "max_consecutive_skipped_steps (0 = never stop)"
            )

    def _apply(self, factor: float | None, used: list[list[bool]]) -> None:
        self._cut_runs(used)
        publishing = PublishWork(self._masters)
        if self._updater is not None:
            work = [entry for entry in zip(self._masters, self._reducer.buckets, used, strict=True) if any(entry[2])]
            with step_hooks(self.optimizer):
                store = self._kept_updates(factor, used)
                self._updater.run(work, factor, publishing.start, store, self._steps)
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        else:
            self._update_by_step(factor, used)
            for master, flags in zip(self._masters, used, strict=True):
                if any(flags):
                    master.publish()
                    publishing.start(master)
        for master, flags in zip(self._masters, used, strict=True):
            master.bucket.note_update(flags)
        publishing.wait()

    def _cut_runs(self, used: list[list[bool]]) -> None:
        """Cuts runs in which only some parameters have gradients, so that the others are left alone."""
        is_new = False  # from values that are equal on all ranks: some may have nothing to cut
        for number, (master, flags) in enumerate(zip(self._masters, used, strict=True)):
            if all(flags) or not any(flags) or (number, tuple(flags)) in self._cut_for:
                continue
            self._cut_for.add((number, tuple(flags)))
            is_new = True
            for run in list(master.runs):
                cut = master.split(run, flags)
                if len(cut) > 1:
                    self._replace_run(run, cut)
        if is_new:
            self._attach_segments()

    def _update_by_step(self, factor: float | None, used: list[list[bool]]) -> None:
        """Gives fp32 gradients to an optimizer without a flat update, and calls its ``step``."""
        for master, gradients, flags in zip(self._masters, self._reducer.buckets, used, strict=True):
            grad = gradients.result
            for run in master.runs:
                if grad is None or not flags[master.tile_intervals(run.interval)[0][0]]:
                    run.param.grad = None
                    continue
                part = grad[run.interval.start : run.interval.stop].to(run.param.dtype)
                if factor is not None:
                    part = part * factor
                run.param.grad = part[: run.param.numel()].view(run.param.shape)
        self.optimizer.step()
        for master in self._masters:
            for run in master.runs:
                run.param.grad = None

    def _kept_updates(self, factor: float | None, used: list[list[bool]]) -> dict[MasterBucket, Callable[[], None]]:
        """Returns functions that apply the speculative updates that turned out right, by master."""
        speculation = self.speculation
        if speculation is None:
            return {}
        kept = speculation.settle(factor, used)
        return {self._masters[position]: partial(speculation.store, one) for position, one in kept.items()}


class StepAgreement:
    """The exchange of one optimizer's updates.

    Args:
        masters: The masters to update; the list may grow.
        reducer: The reducer of the gradients.
        groups: The ranks that share them.
        agreement: Keeps the checksum of the order of gathers.
    """

    def __init__(
        self, masters: list[MasterBucket], reducer: GradientReducer, groups: Groups, agreement: Agreement
    ) -> None:
        self._masters = masters
        self._reducer = reducer
        self._groups = groups
        self._agreement = agreement

    def exchange(self, extra: Sequence[float]) -> tuple[float, list[list[bool]], torch.Tensor]:
        """Exchanges the numbers that the update needs.

        The host waits for the device once, to read what all ranks have sent. One small exchange over the job also
        compares the checksums of the gathers' order. Flags concern the peers only. If these are not all ranks, the
        others have different parameters, and flags are exchanged separately.

        Returns:
            Sum of squares of the whole gradient; per bucket and parameter, whether it got a gradient on any rank that
            shares it; the ``extra`` numbers of each rank of the job, 2-D, fp64.
        """
        groups = self._groups
        flags = [
            *_pack_flags([used for gradients in self._reducer.buckets for used in gradients.used]),
            self._digest_of_writes(),
        ]
        squares, on_device = self._own_squares()
        numbers = [*squares, float(self._agreement.digest), float(_number_of_order(groups)), *extra]
        together = groups.job is groups.peers
        mine = torch.tensor(numbers + flags if together else numbers, dtype=torch.float64)
        if on_device is not None:
            mine = mine.to(on_device.device, non_blocking=True)
            mine[: len(squares)] += on_device
        rows = groups.job.gather_small(
            mine,
            channel="step",
            label="the update (optimizer.step)",
        )
        _check_order(rows)
        received = rows[:, len(numbers) - len(extra) : len(numbers)]
        flag_rows = rows[:, len(numbers) :]
        if not together:
            flag_rows = groups.peers.gather_small(
                torch.tensor(flags, dtype=torch.float64), channel="step", label="which parameters are updated"
            )
        flag_rows, writes = flag_rows[:, :-1], flag_rows[:, -1]
        _check_writes(writes)
        if bool((flag_rows != flag_rows[0]).any()):
            self._reducer.note_uneven()
        counted, copies = rows[:, 0].sum().item(), rows[:, 1].sum().item()
        # The planner's one simulated rank may count nothing; elsewhere both are 0 then.
        total = (counted or copies) if math.isfinite(copies) else counted + copies
        return total, self._merge_flags(flag_rows), received

    def _digest_of_writes(self) -> float:
        """Returns a checksum of the set gradients of parameters that all peers share; 0 if the program set none."""
        shared = self._groups.among_peers
        names = [
            gradients.bucket.layout.tiles[index].name
            for gradients in self._reducer.buckets
            if gradients.writes and shared(gradients.bucket.group) is None
            for index in sorted(gradients.writes)
        ]
        return float(zlib.crc32("\n".join(names).encode())) if names else 0.0

    def _own_squares(self) -> tuple[list[float], torch.Tensor | None]:
        """Returns this rank's parts of the sum of squares: those that it counts, and those that others count.

        Returns:
            (The two sums, as far as the host knows them; what must be added to them, 1-D fp64 on the device that the
            exchange of the update accepts, or None.)
        """
        squares, accepted = [0.0, 0.0], self._groups.job.small_device
        on_device: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for master, gradients in zip(self._masters, self._reducer.buckets, strict=True):
            found = gradients.sum_of_squares()
            column = 0 if master.counts else 1
            if found is None:
                continue
            if found.device.type in ("cpu", "meta"):
                squares[column] += found.item()
            else:
                on_device[column].append(found)
        if not any(on_device):
            return squares, None
        nothing = next(one for column in on_device for one in column).new_zeros(())
        sums = torch.stack([torch.stack(column or [nothing]).sum() for column in on_device])
        if accepted is not None and accepted.type == sums.device.type:
            return squares, sums
        return [known + more for known, more in zip(squares, sums.cpu().tolist(), strict=True)], None

    def _merge_flags(self, rows: torch.Tensor) -> list[list[bool]]:
        """Returns, per bucket and parameter, whether any rank that shares it had a gradient.

        Args:
            rows: The packed flags of every peer.
        """
        count = sum(len(gradients.used) for gradients in self._reducer.buckets)
        merged: dict[str, list[bool]] = {}
        used, position = [], 0
        for gradients in self._reducer.buckets:
            group = gradients.bucket.group
            if group.name not in merged:
                members = self._groups.among_peers(group)
                merged[group.name] = _unpack_flags(rows if members is None else rows[members], count)
            stop = position + len(gradients.used)
            # Copies in other parts of the model are summed whole, even if only some of them were used.
            whole = group.spans_stages and (self._reducer.keeps_own or gradients.result is not None)
            used.append([True] * len(gradients.used) if whole else merged[group.name][position:stop])
            position = stop
        return used

    def refuse_unused(self, used: list[list[bool]]) -> None:
        """Raises on every rank, or on none.

        Raises:
            CallOrderError: Some parameter got no gradient on any rank, and the configuration forbids that.
        """
        names = [
            tile.name
            for master, flags in zip(self._masters, used, strict=True)
            for tile, parameter, flag in zip(master.layout.tiles, master.bucket.params, flags, strict=True)
            if not flag and parameter.requires_grad and tile.param_group >= 0 and tile.numel
        ]
        counts = torch.tensor([len(names)])
        if not self._groups.has_all_flags:
            label = "the search for parameters without a gradient"
            counts = self._groups.job.gather_small(counts, channel="step", label=label).view(-1)
        if bool(counts.any()):
            self._reducer.clear()
            names = names or [f"those of rank(s) {torch.nonzero(counts).view(-1).tolist()}"]
            raise CallOrderError(
                f"{len(names)} parameter(s) got no gradient on any rank: {', '.join(names[:10])}; zero_optimization."
                "ignore_unused_parameters is false, so that is an error. Use them in the loss, freeze them, or set it "
                "to true"
            )

    def first_offender(self) -> tuple[int, str]:
        """Returns the lowest rank and first parameter, in model order, with a non-finite gradient.

        The same on all ranks.
        """
        mine = first = 0
        names: list[str] = []
        for master, gradients in zip(self._masters, self._reducer.buckets, strict=True):
            names += [tile.name for tile in master.layout.tiles]
            result = gradients.result
            if mine == 0:
                tile = gradients.first_not_finite() if result is None else master.first_non_finite(result)
                if tile is not None:
                    mine = first + tile + 1
            first += len(master.layout.tiles)
        rows = self._groups.job.gather_small(
            torch.tensor([mine], dtype=torch.int64), channel="step", label="the search for a non-finite gradient"
        )
        found = rows.view(-1).tolist()
        for rank, index in enumerate(found):
            if index:
                return rank, self._name_on(rank, names[mine - 1] if mine else "", names[index - 1 :])
        return 0, "the sum of all gradients"  # every element is finite, but their squares overflow

    def _name_on(self, rank: int, mine: str, same: list[str]) -> str:
        """Returns the name of a parameter of ``rank``, which ranks with another part of the model do not have.

        Args:
            rank: In the job; the same on all ranks.
            mine: The name on this rank.
            same: Begins with the name, where ranks have the same part of the model.
        """
        if self._groups.job is self._groups.peers:
            return same[0]
        text = mine.encode()[:_NAME].ljust(_NAME, b"\0")
        rows = self._groups.job.gather_small(
            torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64),
            channel="step",
            label="the name of a non-finite gradient",
        )
        return bytes(rows[rank].tolist()).rstrip(b"\0").decode(errors="replace")


def _number_of_order(groups: Groups) -> int:
    """Returns a number that ranks share if they must gather in one order: the rank in the job of the first of them."""
    first = groups.gathering.ranks[:1]
    return groups.job.ranks.index(first[0]) if first and groups.job.ranks else groups.job.rank


def _check_order(rows: torch.Tensor) -> None:
    """Raises on every rank where ranks that gather in one order have other checksums of it."""
    expected: dict[float, float] = {}
    for _, _, digest, order in rows[:, :4].tolist():
        if expected.setdefault(order, digest) != digest:
            raise DivergenceError(
                "ranks ran different numbers of forwards and backwards since the last step, or gathered parameters in "
                f"different orders (checksums by rank: {[int(one) for one in rows[:, 2].tolist()]}); nothing was "
                "updated. Every rank must run the same modules, for as many micro-batches"
            )


def _check_writes(digests: torch.Tensor) -> None:
    """Raises on every rank where some ranks have set gradients that others have not."""
    if bool((digests != digests[0]).any()):
        alike = torch.nonzero(digests == digests[0]).view(-1).tolist()
        raise DivergenceError(
            "optimizer.step: every rank must have set, changed or discarded the gradients of the same parameters "
            "(safe_set_full_grad, safe_set_local_grad, parameter.grad = ..., module.zero_grad()), but ranks "
            f"{alike} have done so with others than the rest, so the replicas of the parameters would differ; nothing "
            "was updated. Make these calls on every rank, with the same parameters and values"
        )


def _pack_flags(flags: list[bool]) -> list[float]:
    numbers = []
    for start in range(0, len(flags), _FLAGS_PER_NUMBER):
        bits = 0
        for offset, flag in enumerate(flags[start : start + _FLAGS_PER_NUMBER]):
            bits |= int(flag) << offset
        numbers.append(float(bits))
    return numbers


def _unpack_flags(rows: torch.Tensor, count: int) -> list[bool]:
    """Returns the bitwise or over the ranks."""
    flags: list[bool] = []
    for column in range(rows.shape[1]):
        bits = 0
        for value in rows[:, column].tolist():
            bits |= int(value)
        flags += [bool(bits >> offset & 1) for offset in range(_FLAGS_PER_NUMBER)]
    return flags[:count]


class BF16_Optimizer(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 0 in bf16; a class of its own because programs test for it with ``isinstance``."""


class FP16_Optimizer(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 0 in fp16, around one that works element by element."""


class FP16_UnfusedOptimizer(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 0 in fp16, around one that needs whole tensors, such as LAMB."""
