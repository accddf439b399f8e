"""The update: unscale, norm, overflow check, clip, update the runs, publish, clear.

:class:`Updater` has the order of these steps. ``zero.update.step_agreement`` has the exchange before them. Programs
call ``deepspeed.engine.zero_optimizer``.

The gradient is multiplied by one fp32 factor (unscaling times clipping) inside the update, at the same point for every
stage, so that the stage never changes the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deepspeed.errors import CallOrderError, NonFiniteError
from deepspeed.logging import log_dist
from deepspeed.ops.base import step_hooks
from deepspeed.ops.elementwise import flat_updater
from deepspeed.ops.flat import FlatUpdate
from deepspeed.ops.rounding import NarrowStates
from deepspeed.torch_private import storage_key
from deepspeed.zero.gather.agreement import Agreement
from deepspeed.zero.gradient.gradient_sum import gradient_factor, norm_from_squares
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.group import Groups
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.storage import MemoryTracker, StorageKind
from deepspeed.zero.update.driver import MeanGradient, UpdateDriver, UpdateParts
from deepspeed.zero.update.loop import ChunkUpdater, UpdateStrategy
from deepspeed.zero.update.masters import MasterBucket, MasterRun, PublishWork, fragment_tables, split_state
from deepspeed.zero.update.speculation import SpeculativeUpdater
from deepspeed.zero.update.step_agreement import StepAgreement, StepExchange


@dataclass(frozen=True)
class UpdateOptions:
    """Holds the settings of updates, from the configuration."""

    strategies: Mapping[Tier, UpdateStrategy]  # how masters of every tier in use are updated
    driver: UpdateDriver = field(default_factory=MeanGradient)  # exchanges what the update needs of other ranks
    loss_scaler: Any = None  # fp16 loss scaler, or None
    clip_grad: float = 0.0  # largest gradient norm, 0 for no clipping
    max_skipped: int = 0  # non-finite steps in a row before training stops; 0 = never
    skip_non_finite: bool = False  # skip an update with a non-finite gradient (always, in fp16)


@dataclass
class StepReport:
    """Reports what one update did."""

    norm: float  # unscaled gradient norm before clipping
    overflow: bool  # whether a gradient was not finite; then nothing was changed
    extra: torch.Tensor  # what each rank of the job gave to :meth:`Updater.exchange`, by rank: 2-D, fp64


class Updater:
    """Updates the masters that this rank owns by reduced gradients, with a torch optimizer over their runs."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: list[MasterBucket],
        reducer: GradientReducer,
        options: UpdateOptions,
        *,
        placement: Placement,
        groups: Groups,
        agreement: Agreement,
        memory_tracker: MemoryTracker,
    ) -> None:
        flat = flat_updater(optimizer)
        if placement.narrow_states and flat is not None:
            flat = NarrowStates(flat)
        self.optimizer = optimizer
        self.masters = masters
        self.driver = options.driver
        self.loss_scaler = options.loss_scaler  # fp16 loss scaler, or None
        # The fused update of the torch optimizer, which also lists the state that a run needs; None if it has none.
        self.flat_update: FlatUpdate | None = flat
        self.speculation: SpeculativeUpdater | None = None  # starts updates early
        self.clip_grad = options.clip_grad  # largest gradient norm, 0 for no clipping
        self.overflow = False  # whether the latest update was skipped because a gradient was not finite
        self.last_report: StepReport | None = None
        self.skipped_in_a_row = 0  # updates skipped since the last one that was applied
        self._steps = 0
        self._reducer = reducer
        self._groups = groups
        self._memory_tracker = memory_tracker
        self._step_agreement = StepAgreement(masters, reducer, groups, agreement)
        self._max_skipped = options.max_skipped
        self._skip_non_finite = options.skip_non_finite
        self._first_skip = ""
        self._cut_for: set[tuple[int, tuple[bool, ...]]] = set()
        self._needs_fragments = callable(getattr(optimizer, "attach_segments", None))
        self._attach_segments()
        self._chunks = (
            None if flat is None else ChunkUpdater(flat, optimizer, options.strategies, rounds=placement.narrow_masters)
        )
        self.driver.open(
            UpdateParts(masters, reducer, groups, memory_tracker, self.carry_user_writes, self.publish_masters)
        )
        self.driver.begin_update(self._steps)
        if placement.speculates and flat is not None and self.driver.reads_mean_gradients:
            self.speculation = SpeculativeUpdater(
                masters,
                reducer,
                flat,
                optimizer,
                strategies=options.strategies,
                loss_scaler=self.loss_scaler,
                memory_tracker=memory_tracker,
            )

    @property
    def steps(self) -> int:
        """Number of updates, skipped ones included; it decides the phase of the next one."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps = count
        self.driver.restart()
        self.driver.begin_update(count)

    @property
    def loss_scale(self) -> float:
        """Factor on the loss: 1 unless fp16."""
        return float(self.loss_scaler.loss_scale) if self.loss_scaler is not None else 1.0

    def override_loss_scale(self, loss_scale: float) -> None:
        """Sets the scale from now on; a dynamic one continues from there.

        Raises:
            CallOrderError: There is no loss scale.
        """
        if self.loss_scaler is None:
            raise CallOrderError("override_loss_scale: there is no loss scale; it exists only with fp16.enabled")
        before = self.loss_scale
        self.loss_scaler.cur_scale = float(loss_scale)
        self._reducer.scale_feedback(self.loss_scale / before)

    # -- the update --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def exchange(self, extra: Sequence[float] = ()) -> StepExchange:
        """Exchanges norm and flags of the gradients, which are all reduced. Every rank must call it before an update.

        Raises:
            CallOrderError: A program changed the param groups, or a parameter got no gradient and must have one; then
                all gradients are discarded.
            DivergenceError: Ranks kept different orders of collectives.
        """
        refuse_changed_groups(self.optimizer, sum(len(master.runs) for master in self.masters))
        self._carry_user_writes()
        exchanged = self._step_agreement.exchange(extra)
        if not self._reducer.policy.allow_unused:
            self._step_agreement.refuse_unused(exchanged.used)
        return exchanged

    @torch.no_grad()
    def apply(self, exchanged: StepExchange, divisor: float = 1.0) -> StepReport:
        """Updates the masters and discards the gradients. A non-finite gradient skips it everywhere.

        Every rank must call it, with no parameter gathered.

        Raises:
            NonFiniteError: Too many skipped steps in a row, or an overflow at the minimum loss scale.
        """
        used = exchanged.used
        self._steps += 1
        scale = self.loss_scale * divisor
        norm = norm_from_squares(exchanged.squares) / scale
        self.overflow = not math.isfinite(exchanged.squares) and (self._skip_non_finite or self.loss_scaler is not None)
        self.last_report = report = StepReport(norm, self.overflow, exchanged.extra)
        if self.overflow:
            self._skip(self.loss_scale)
        else:
            self.skipped_in_a_row = 0
            if self.driver.reads_mean_gradients:  # nearly every optimizer; without communication
                factor = gradient_factor(norm, scale=scale, clip_grad=self.clip_grad)
            else:
                sent = self.driver.exchange(norm, used, scale=scale, clip_grad=self.clip_grad)
                factor, used = sent.factor, sent.used
                self.last_report = report = StepReport(sent.norm, overflow=False, extra=exchanged.extra)
            self._update_runs(factor, used)
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
        for master in self.masters:
            master.bucket.remember_values()

    def _carry_user_writes(self) -> None:
        """Does nothing for sharded parameters, whose writes were kept when they were freed."""
        for position, master in enumerate(self.masters):
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
        self.skipped_in_a_row += 1
        what = f"step {self.steps}: the gradient is not finite, first in {name!r} (slice of rank {rank})"
        if self.skipped_in_a_row == 1:
            self._first_skip = what
        self._reducer.clear()
        self._update_scale(overflow=True)
        if self.loss_scaler is not None:
            log_dist(f"{what}; skipped. {self.loss_scaler.describe_change(scale)}")
        else:
            log_dist(f"{what}; skipped, nothing was changed")
        if self._max_skipped and self.skipped_in_a_row >= self._max_skipped:
            raise NonFiniteError(
                f"{self.skipped_in_a_row} steps in a row had gradients that are not finite. The first: "
                f"{self._first_skip}. Lower the learning rate, check that parameter's inputs, or raise "
                "max_consecutive_skipped_steps (0 = never stop)"
            )

    def _update_runs(self, factor: float | None, used: list[list[bool]]) -> None:
        self._cut_runs(used)
        publishing = PublishWork(self.masters)
        if self._chunks is not None:
            work = [entry for entry in zip(self.masters, self._reducer.buckets, used, strict=True) if any(entry[2])]
            with step_hooks(self.optimizer):
                store = {}  # of updates that were started early and turned out right
                if (speculation := self.speculation) is not None:
                    for position, early in speculation.settle(factor, used).items():
                        store[self.masters[position]] = partial(speculation.store, early)
                self._chunks.run(work, factor, publishing.start, store, self._steps)
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        else:
            self._update_by_step(factor, used)
            for master, flags in zip(self.masters, used, strict=True):
                if any(flags):
                    master.publish()
                    publishing.start(master)
        for master, flags in zip(self.masters, used, strict=True):
            master.bucket.note_update(flags)
        publishing.wait()

    def _cut_runs(self, used: list[list[bool]]) -> None:
        """Cuts runs in which only some parameters have gradients, so that the others are left alone."""
        is_new = False  # from values that are equal on all ranks: some may have nothing to cut
        for number, (master, flags) in enumerate(zip(self.masters, used, strict=True)):
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
        for master, gradients, flags in zip(self.masters, self._reducer.buckets, used, strict=True):
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
        for master in self.masters:
            for run in master.runs:
                run.param.grad = None

    # -- masters and runs --------------------------------------------------------------------------------------------

    def refresh_fp32_params(self) -> None:
        """Reads the masters again from the compute parameters (after they were loaded or written)."""
        for master in self.masters:
            master.refresh_all()
            master.bucket.remember_values()

    def publish_masters(self) -> None:
        """Updates the compute parameters from masters that were written; no parameter may be gathered.

        Every rank that shares them must call it.
        """
        publishing = PublishWork(self.masters)
        for master in self.masters:
            master.publish()
            publishing.start(master)
        publishing.wait()

    def cut_runs(self, labels: Sequence[Sequence[Any]]) -> None:
        """Cuts runs until all parameters of a run have the same label. Every rank must call it.

        Needed where parameters that share a run must not share its scalar states (their step counts differ).

        Args:
            labels: For each master, a label for each tile of its bucket; compared by ``==``.
        """
        for master, of_tiles in zip(self.masters, labels, strict=True):
            for run in list(master.runs):
                cut = master.split(run, of_tiles)
                if len(cut) > 1:
                    self._replace_run(run, cut)
        self._attach_segments()

    def add_masters(self, masters: Sequence[MasterBucket]) -> None:
        """Adds the runs of newly trained parameters to their param groups. Every rank must call it."""
        for master in masters:
            for run in master.runs:
                self.optimizer.param_groups[run.interval.param_group]["params"].append(run.param)
        if self.speculation is not None:
            self.speculation.add_masters()
        self._attach_segments()

    def _replace_run(self, run: MasterRun, cut: list[MasterRun]) -> None:
        params = self.optimizer.param_groups[run.interval.param_group]["params"]
        position = next(index for index, param in enumerate(params) if param is run.param)
        params[position : position + 1] = [new.param for new in cut]
        state = self.optimizer.state.pop(run.param, None)
        if state:
            for new in cut:
                self.optimizer.state[new.param] = split_state(state, run, new)

    def _attach_segments(self) -> None:
        if self._needs_fragments:
            tables = fragment_tables(self.masters, self._groups.other_parts)
            self.optimizer.attach_segments(*tables)  # type: ignore[attr-defined]

    def count_state(self) -> int:
        """Returns the bytes of the optimizer's state on this rank, in all tiers.

        Also written into the memory tracker.
        """
        nbytes, seen = dict.fromkeys(Tier, 0), set[tuple[int, int]]()
        for master in self.masters:
            for run in master.runs:
                for value in self.optimizer.state.get(run.param, {}).values():
                    if not isinstance(value, torch.Tensor) or value.dim() == 0:
                        continue
                    place = (storage_key(value), int(value.storage_offset()))
                    if place not in seen:
                        seen.add(place)
                        self._memory_tracker.claim(value)
                        nbytes[master.state_tier] += value.numel() * value.element_size()
        for tier, counted in nbytes.items():
            self._memory_tracker.set(StorageKind.OPTIMIZER, tier, counted)
        return sum(nbytes.values())

    def destroy(self) -> None:
        """Frees the gradients, removes their hooks from the model, and ends the driver."""
        self._reducer.clear()
        self._reducer.remove()
        if self.speculation is not None:
            self.speculation.close()
        self.driver.end()


def refuse_changed_groups(optimizer: torch.optim.Optimizer, runs: int) -> None:
    """Raises if parameters were added to a group or taken from it, or if a group with parameters was added.

    Raises:
        CallOrderError: The groups list something else, which would never be trained.
    """
    counts = [len(group["params"]) for group in optimizer.param_groups]
    if sum(counts) != runs:
        raise CallOrderError(
            f"engine.step: the {len(counts)} param groups of {type(optimizer).__name__} list {sum(counts)} "
            f"tensors, but this rank trains {runs}: a group's `params` were changed, or add_param_group was "
            f"called. {FIXED_GROUPS}"
        )


FIXED_GROUPS = (
    "deepspeed.initialize fixes which parameters belong to which group; the other entries of a group, such as "
    "lr, may change. Give the optimizer all parameters before initialize: those that train later with "
    "requires_grad=False until then, which costs no optimizer state"
)
"""Why param groups stay as they are, and what to do instead, for messages."""
