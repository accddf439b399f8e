"""The whole update: unscale, norm, overflow check, clip, update the runs, publish, clear.

The gradient is multiplied by one fp32 factor (unscaling times clipping) inside the update, at the same point for every
stage, so that the stage never changes the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepspeed.comm.transports.transport import Work
from deepspeed.comm.watch.agreement import Agreement
from deepspeed.errors import CallOrderError, NonFiniteError
from deepspeed.logging import log_dist
from deepspeed.ops.base import evaluate, step_hooks
from deepspeed.ops.elementwise import flat_updater
from deepspeed.ops.flat import FlatUpdate
from deepspeed.ops.onebit.phases import ExchangesMomentum
from deepspeed.ops.rounding import NarrowStates
from deepspeed.uncompiled import torchs
from deepspeed.zero.gradient.gradient_sum import norm_from_squares
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.group import Groups
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.storage import MemoryTracker, StorageKind, storage_key
from deepspeed.zero.tiling.layout import DATA
from deepspeed.zero.update.base_optimizer import ZeROOptimizer, refuse_changed_groups
from deepspeed.zero.update.driver import MeanGradient, StepAgreement, UpdateDriver, UpdateParts, gradient_factor
from deepspeed.zero.update.loop import ChunkUpdater, UpdateStrategy
from deepspeed.zero.update.masters import MasterBucket, MasterRun, segment_tables, split_state
from deepspeed.zero.update.speculation import SpeculativeUpdater


@dataclass
class StepReport:
    """Reports what one update did.

    Attributes:
        norm: Unscaled gradient norm before clipping.
        overflow: Whether a gradient was not finite; then nothing was changed.
        extra: What each rank of the job gave to :meth:`DeepSpeedZeroOptimizer.update`, by rank: 2-D, fp64.
    """

    norm: float
    overflow: bool
    extra: torch.Tensor


class DeepSpeedZeroOptimizer(ZeROOptimizer):
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
        driver: Exchanges what the update needs of other ranks; None: the one for the optimizer.
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
        self.optimizer = optimizer
        self.driver = driver_of(optimizer) if driver is None else driver
        self.clip_grad = clip_grad
        self.overflow = False
        self.loss_scaler = loss_scaler
        self.parameter_offload: Any = None
        self.last_report: StepReport | None = None
        self._masters = masters
        self._reducer = reducer
        self._groups = groups
        self._step_agreement = StepAgreement(masters, reducer, groups, agreement)
        self._memory_tracker = ledger
        self._max_skipped = max_skipped
        self._skip_non_finite = skip_non_finite
        self._leave_backward = leave_backward
        self._before_update = before_update
        self._backward = backward
        self._update_by_losses: Callable[[], Any] = self.update
        self._steps = 0
        self._skipped_in_a_row = 0
        self._first_skip = ""
        self._cut_for: set[tuple[int, tuple[bool, ...]]] = set()
        self._flat: FlatUpdate | None = flat_updater(optimizer)
        if placement.narrow_states and self._flat is not None:
            self._flat = NarrowStates(self._flat)
        self._updater = (
            None
            if self._flat is None
            else ChunkUpdater(self._flat, optimizer, strategies, rounds=placement.narrow_masters)
        )
        self.driver.open(
            UpdateParts(masters, reducer, groups, ledger, self.carry_user_writes, self.publish_masters),
        )
        self.driver.begin_update(self._steps)
        self.speculation: SpeculativeUpdater | None = None
        if placement.speculates and self._flat is not None and self.driver.reads_mean_gradients:
            self.speculation = SpeculativeUpdater(
                masters,
                reducer,
                self._flat,
                optimizer,
                strategies=strategies,
                factor=lambda: gradient_factor(0.0, scale=self.loss_scale, clip_grad=0.0),
                memory_tracker=ledger,
            )
        self._needs_segments = callable(getattr(optimizer, "attach_segments", None))
        self._attach_segments()

    # -- the public face ---------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Factor on the loss: 1 unless fp16."""
        return float(self.loss_scaler.loss_scale) if self.loss_scaler is not None else 1.0

    cur_scale = loss_scale

    @property
    def steps(self) -> int:
        """Updates so far, skipped ones included; they decide in which phase the next one is."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        self._steps = count
        self.driver.restart()
        self.driver.begin_update(count)

    @property
    def dynamic_loss_scale(self) -> bool:
        """Returns whether the loss scale follows the gradients."""
        return bool(getattr(self.loss_scaler, "dynamic", False))

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

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of every param group."""
        for group in self.param_groups:
            group["lr"] = lr

    def get_lr(self) -> float:
        """Learning rate of the first param group."""
        return self.param_groups[0]["lr"]

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Runs the engine's backward of a 0-dim ``loss``."""
        self._backward(loss, retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throws away every gradient, reduced or not."""
        self._leave_backward("optimizer.zero_grad")
        self._reducer.zero_grad()

    # -- losses that are sums (deepspeed.engine.train_step) ------------------------------------------------------------

    def attach_losses(self, update: Callable[[], Any], clear: Callable[[], None]) -> None:
        """Connects the counter of losses.

        Args:
            update: Calls :meth:`update` with what the gradients are divided by; :meth:`step` calls it.
            clear: Called when all gradients are thrown away or were used.
        """
        self._update_by_losses = update
        self._reducer.on_clear = clear

    @property
    def mean_over(self) -> int:
        """Divisor of the sum over ranks of a gradient that all data-parallel ranks share."""
        return self._groups.by_name[DATA].divisor if self._reducer.policy.is_mean else 1

    @property
    def copies(self) -> int:
        """Ranks of the job that compute the same losses: those that hold other parts of the model."""
        return self._groups.job.size // self._groups.peers.size

    def gather_over_job(self, number: float, label: str) -> torch.Tensor:
        """Returns a number of every rank of the job, 1-D, fp64. Every rank must call it."""
        mine = torch.tensor([number], dtype=torch.float64)
        return self._groups.job.gather_small(mine, channel="call", label=label).view(-1)

    def scale_feedback(self, factor: float) -> None:
        """Multiplies the error feedback of reductions: the unit of gradients has changed."""
        self._reducer.scale_feedback(factor)

    def refresh_fp32_params(self) -> None:
        """Reads the masters again from the compute parameters (after they were loaded or written)."""
        for master in self._masters:
            master.refresh_all()
            master.bucket.remember_values()

    def state_dict(self) -> dict[str, Any]:
        """State of this rank's runs; for a file that other world sizes can read, save a checkpoint."""
        return {
            "optimizer": torchs(self.optimizer.state_dict)(),
            "loss_scaler": self.loss_scaler.state_dict() if self.loss_scaler is not None else None,
            "masters": [master.flat.clone() for master in self._masters],
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def load_state_dict(self, state_dict: dict[str, Any], **_ignored: Any) -> None:
        """Restores :meth:`state_dict` of a run with the same layout; group dicts stay the same objects."""
        self._leave_backward("optimizer.load_state_dict")
        groups = self.optimizer.param_groups
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for kept, loaded in zip(groups, self.optimizer.param_groups, strict=True):
            params = kept["params"]
            kept.update(loaded)
            kept["params"] = params
        self.optimizer.param_groups = groups
        if self.loss_scaler is not None and state_dict["loss_scaler"] is not None:
            self.loss_scaler.load_state_dict(state_dict["loss_scaler"])
        self._before_update()
        for master, saved in zip(self._masters, state_dict["masters"], strict=True):
            master.flat.copy_(saved)
            master.publish()
        self._finish_publishing([work for m in self._masters if (work := m.bucket.start_publish()) is not None])
        self._skipped_in_a_row = state_dict["skipped_in_a_row"]
        self.driver.restart()

    # -- what checkpoints need ---------------------------------------------------------------------------------------

    @property
    def flat_update(self) -> FlatUpdate | None:
        """The fused update of the torch optimizer, which also lists the state that a run needs; None if it has none."""
        return self._flat

    @property
    def skipped_in_a_row(self) -> int:
        """Updates skipped since the last one that was applied."""
        return self._skipped_in_a_row

    @skipped_in_a_row.setter
    def skipped_in_a_row(self, count: int) -> None:
        self._skipped_in_a_row = count

    def carry_user_writes(self) -> None:
        """Takes what users wrote into resident parameters into buckets and masters, as the next step would."""
        self._carry_user_writes()
        for master in self._masters:
            master.bucket.remember_values()

    def publish_masters(self) -> None:
        """Makes the compute parameters follow masters that were written. Every rank that shares them must call it."""
        self._before_update()
        publishing: list[Work] = []
        for master in self._masters:
            master.publish()
            self._start_publish(master, publishing)
        self._finish_publishing(publishing)

    def cut_runs(self, labels: Sequence[Sequence[Any]]) -> None:
        """Cuts runs until all parameters of a run have the same label. Every rank must call it.

        Needed where parameters that share a run must not share its scalar states (their step counts differ).

        Args:
            labels: For each master, a label for each tile of its bucket; compared by ``==``.
        """
        for master, of_tiles in zip(self._masters, labels, strict=True):
            for run in list(master.runs):
                cut = master.split(run, of_tiles)
                if len(cut) > 1:
                    self._replace_in_optimizer(run, cut)
        self._attach_segments()

    def add_masters(self, masters: Sequence[MasterBucket]) -> None:
        """Takes the runs of parameters that are trained from now on into their param groups. Every rank must call it.

        Args:
            masters: Which are in the list of masters already.
        """
        for master in masters:
            for run in master.runs:
                self.optimizer.param_groups[run.span.param_group]["params"].append(run.param)
        if self.speculation is not None:
            self.speculation.add_masters()
        self._attach_segments()

    def destroy(self) -> None:
        """Frees the gradients and takes the gradient hooks from the model."""
        self._reducer.clear()
        self._reducer.remove()
        if self.speculation is not None:
            self.speculation.close()
        self.driver.end()

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
        self._update_by_losses()
        return loss

    @torch.no_grad()
    def update(
        self, extra: Sequence[float] = (), divisor_of: Callable[[torch.Tensor], float] | None = None
    ) -> StepReport:
        """Makes the whole update; every rank must call it. A non-finite gradient skips it everywhere.

        Args:
            extra: Numbers for all ranks of the job; they are gathered together with the gradient's norm. Every rank
                must give as many.
            divisor_of: From the ``extra`` numbers of all ranks to what the gradients are divided by, besides the loss
                scale; None: nothing.

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
            # Of nearly every optimizer: 1 / loss scale times the clip factor, and nothing is sent.
            exchanged = self.driver.exchange(norm, used, scale=scale, clip_grad=self.clip_grad)
            self.last_report = report = StepReport(exchanged.norm, overflow=False, extra=rows)
            self._apply(exchanged.factor, exchanged.used)
            self._reducer.commit()
            self._reducer.clear()
        self._reducer.end_update(self.steps)
        self.driver.begin_update(self.steps)
        if not self.overflow:
            self._update_scale(overflow=False)
        self.driver.end_update()
        return report

    def _update_scale(self, *, overflow: bool) -> None:
        if self.loss_scaler is not None:
            before = self.loss_scale
            self.loss_scaler.update_scale(overflow)
            if self.loss_scale != before:
                self._reducer.scale_feedback(self.loss_scale / before)

    def _carry_user_writes(self) -> None:
        for position, master in enumerate(self._masters):
            changed = master.bucket.take_back_changes()
            if changed and self.speculation is not None:
                self.speculation.note_write(position)
            for index in changed:
                master.refresh(index)

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
        publishing: list[Work] = []
        if self._updater is not None:
            work = [entry for entry in zip(self._masters, self._reducer.buckets, used, strict=True) if any(entry[2])]
            with step_hooks(self.optimizer):
                store = self._kept_updates(factor, used)
                self._updater.run(
                    work, factor, lambda master: self._start_publish(master, publishing), store, self._steps
                )
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers look for it
        else:
            self._update_by_step(factor, used)
            for master, flags in zip(self._masters, used, strict=True):
                if any(flags):
                    master.publish()
                    self._start_publish(master, publishing)
        for master, flags in zip(self._masters, used, strict=True):
            master.bucket.note_update(flags)
        self._finish_publishing(publishing)

    def _cut_runs(self, used: list[list[bool]]) -> None:
        """Cuts runs in which only some parameters have gradients, so that the others are left alone."""
        is_new = False  # decided by what is equal on all ranks: some of them may have nothing to cut
        for number, (master, flags) in enumerate(zip(self._masters, used, strict=True)):
            if all(flags) or not any(flags) or (number, tuple(flags)) in self._cut_for:
                continue
            self._cut_for.add((number, tuple(flags)))
            is_new = True
            for run in list(master.runs):
                cut = master.split(run, flags)
                if len(cut) > 1:
                    self._replace_in_optimizer(run, cut)
        if is_new:
            self._attach_segments()

    def _replace_in_optimizer(self, run: MasterRun, cut: list[MasterRun]) -> None:
        params = self.optimizer.param_groups[run.span.param_group]["params"]
        position = next(index for index, param in enumerate(params) if param is run.param)
        params[position : position + 1] = [new.param for new in cut]
        state = self.optimizer.state.pop(run.param, None)
        if state:
            for new in cut:
                self.optimizer.state[new.param] = split_state(state, run, new)

    def _attach_segments(self) -> None:
        if self._needs_segments:
            tables = segment_tables(self._masters, self._groups.other_parts)
            self.optimizer.attach_segments(*tables)  # type: ignore[attr-defined]

    def _update_by_step(self, factor: float | None, used: list[list[bool]]) -> None:
        """For optimizers without a flat update: hand out fp32 gradients and call ``step``."""
        for master, gradients, flags in zip(self._masters, self._reducer.buckets, used, strict=True):
            grad = gradients.result
            for run in master.runs:
                if grad is None or not flags[master.tile_spans(run.span)[0][0]]:
                    run.param.grad = None
                    continue
                part = grad[run.span.start : run.span.stop].to(run.param.dtype)
                if factor is not None:
                    part = part * factor
                run.param.grad = part[: run.param.numel()].view(run.param.shape)
        self.optimizer.step()
        for master in self._masters:
            for run in master.runs:
                run.param.grad = None

    def _kept_updates(self, factor: float | None, used: list[list[bool]]) -> dict[MasterBucket, Callable[[], None]]:
        """Returns what takes over the updates that were made before the norm was known and are right."""
        speculation = self.speculation
        if speculation is None:
            return {}
        kept = speculation.settle(factor, used)
        return {self._masters[position]: partial(speculation.store, one) for position, one in kept.items()}

    def _start_publish(self, master: MasterBucket, publishing: list[Work]) -> None:
        if not master.is_sharded:
            return  # every rank has updated everything
        work = master.bucket.start_publish()
        if work is not None:
            publishing.append(work)

    def _finish_publishing(self, publishing: list[Work]) -> None:
        for work in publishing:
            work.wait()
        for master in self._masters:
            master.bucket.remember_values()

    def count_state(self) -> int:
        """Bytes of the optimizer's state on this rank, in all tiers; also written into the memory tracker."""
        nbytes, seen = dict.fromkeys(Tier, 0), set[tuple[int, int]]()
        for master in self._masters:
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


class DeepSpeedZeroOptimizer_Stage3(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 3; a class of its own because users and integrations import it."""


class BF16_Optimizer(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 0 in bf16; a class of its own because programs test for it with ``isinstance``."""


class FP16_Optimizer(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 0 in fp16, around one that works element by element."""


class FP16_UnfusedOptimizer(DeepSpeedZeroOptimizer):  # noqa: N801 - the public name
    """The optimizer at stage 0 in fp16, around one that needs whole tensors, such as LAMB."""


def driver_of(optimizer: torch.optim.Optimizer | None) -> UpdateDriver:
    """Returns the driver for what the updates of an optimizer exchange."""
    if isinstance(optimizer, ExchangesMomentum):
        from deepspeed.zero.onebit import momentum_driver_of  # few train with it

        return momentum_driver_of(optimizer)
    return MeanGradient()
