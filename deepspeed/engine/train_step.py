"""The training step of one engine: forward, backward and update, without the engine's public methods."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.job.trace_points import reason_of
from deepspeed.engine.batches import Batches
from deepspeed.engine.flops import ProfiledStep
from deepspeed.engine.loss_counter import LossCounter, checked_count, mean_of_sum
from deepspeed.engine.loss_scaling import LossScaling
from deepspeed.engine.progress import ProgressLog
from deepspeed.engine.reminders import MissingStep, RowCheck, check_loss, explain_mismatch, paired_roots
from deepspeed.engine_feature import EngineHooks
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.logging import log_dist_once
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.torch_private import call_after_backward, differentiates_a_function
from deepspeed.zero.gradient.program_gradients import GradientUnit
from deepspeed.zero.runtime import MicroBatch, ZeroRuntime
from deepspeed.zero.update.updater import StepReport

_Computed = TypeVar("_Computed")


class TrainStep:
    """Runs the forwards, backwards and updates of one model under ZeRO.

    ``forward``, ``backward`` and ``step`` of ``DeepSpeedEngine`` call :meth:`forward`, :meth:`backward_of_loss` and
    :meth:`update`; for a stage of a pipeline ``PipelineCompute`` does. ``step`` and ``zero_grad`` of the optimizer call
    :meth:`update_parameters` and :meth:`zero_grad`.

    Args:
        is_scheduled: A schedule runs backwards and updates, as in a pipeline; the program, which has no call between
            them, does not see gradients in ``parameter.grad``.
    """

    def __init__(
        self,
        runtime: ZeroRuntime,
        batches: Batches,
        scaling: LossScaling,
        progress: ProgressLog,
        *,
        precision: PrecisionPolicy,
        hooks: EngineHooks,
        profiled: ProfiledStep | None = None,
        counts: LossCounter | None = None,
        checks_rows: bool = True,
        is_scheduled: bool = False,
    ) -> None:
        self.was_applied = False  # whether the latest call of :meth:`update` changed the parameters
        self.reduces_gradients = True  # whether backwards reduce gradients at all
        self.defers_reduction = False  # whether a block of ``no_sync`` or ``coalesce_grad_reduction`` is open
        self.is_scheduled = is_scheduled
        self.profiled = profiled
        self._features = hooks
        self._runtime = runtime
        self._updater = runtime.updater
        self._batches = batches
        self._scaling = scaling
        self.counts = LossCounter(runtime) if counts is None else counts
        self._progress = progress
        self._precision = precision
        self._missing_step = MissingStep()
        self._row_check = RowCheck(is_done=not checks_rows)
        runtime.passes.attach(self.open_backward)

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        fn: Callable[..., Any],
        inputs: Sequence[Any],
        named: Mapping[str, Any],
        *,
        is_training: bool,
        has_data: bool = True,
        announces: bool = True,
    ) -> Any:
        """Runs ``fn(*inputs, **named)`` as a forward of the model.

        Args:
            inputs: Positional arguments. Floating tensors are cast if ``auto_cast`` (of ``fp16`` or ``bf16``) is set.
            named: Keyword arguments; cast in the same way.
            has_data: The arguments are the program's data: the first of them are compared with the micro-batch size.
            announces: Whether a backward through the outputs opens the engine's backward.

        Raises:
            DeepSpeedConfigError: The model was given floating tensors of another dtype than it computes in.
        """
        runtime = self._runtime
        runtime.refuse_offloaded("engine.forward", "lp_params")
        if differentiates_a_function():
            # torch.func.grad and the like differentiate without the engine's backward
            runtime.hooks.refuse_transforms()
            if self._precision.cast_inputs:
                inputs, named = self._precision.cast_arguments(inputs), self._precision.cast_arguments(named)
            with self._precision.forward_context(get_accelerator()):
                return fn(*inputs, **named)
        if not runtime.backward_is_running:  # it is running if this forward is a recomputation
            runtime.drop_open_work()
        runtime.originals.restore()
        if has_data and is_training:
            self._progress.inputs(tuple(inputs), named)
        if has_data and is_training and not self._row_check.is_done and self._updater is not None:
            self._row_check.compare((inputs, named), self._batches.train_micro_batch_size_per_gpu())
        if self._precision.cast_inputs:
            inputs, named = self._precision.cast_arguments(inputs), self._precision.cast_arguments(named)
        keywords = self._features.before_forward(
            is_training=is_training, global_steps=self._batches.global_steps, micro_steps=self._batches.micro_steps
        )
        outputs = self._run_forward(fn, inputs, {**named, **keywords})
        if announces and torch.is_grad_enabled() and not runtime.hooks.sees_forwards:
            runtime.hooks.watch(outputs)
        return outputs

    def _run_forward(self, fn: Callable[..., Any], inputs: Sequence[Any], named: dict[str, Any]) -> Any:
        profiled = self.profiled
        self._progress.before("forward")
        if profiled is not None:
            profiled.before_forward()
        try:
            with (
                self._runtime.passes.in_call(),
                self._progress.counting(fn),
                self._precision.forward_context(get_accelerator()),
            ):
                outputs = fn(*inputs, **named)
        except RuntimeError as error:
            if (reason := reason_of(error)) is not None:
                raise reason from error
            explanation = explain_mismatch(error, self._precision, inputs, named)
            if explanation is None:
                raise
            raise DeepSpeedConfigError(explanation) from error
        if profiled is not None:
            profiled.after_forward()
        self._progress.after("forward")
        return outputs

    # -- backward ----------------------------------------------------------------------------------------------------

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss (0-dim) times the loss scale, for a backward that the program runs itself.

        Raises:
            CallOrderError: Ranks may have different numbers of micro-batches.
        """
        if (uneven := self._features.uneven_batch) is not None:
            raise CallOrderError(
                f"engine.scale: with {uneven.setting} losses are weighted by engine.backward(loss), as "
                "ranks have different numbers of micro-batches; call that instead of loss.backward()"
            )
        self._progress.loss(loss)
        return self._scaling.apply_for_program(loss)

    def backward_of_loss(
        self,
        loss: Any,
        micro_batch: MicroBatch | None = None,
        *,
        divides: bool = True,
        count: Any = None,
        gradient: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Backpropagates a loss. Every rank must call it.

        Args:
            loss: 0-dim or of one element, as the program computed it.
            count: Tokens that the loss is a sum over; None: it is a mean. See :class:`LossCounter`.

        Returns:
            The loss divided by the accumulation steps, without the loss scale; with ``count``, the mean over its
            tokens.

        Raises:
            CallOrderError: ``count`` is given to a run whose ranks may change.
        """
        self._check_backward()
        check_loss(loss, gradient)
        steps = self._batches.gradient_accumulation_steps()
        if count is not None and (uneven := self._features.uneven_batch) is not None:
            raise CallOrderError(
                f"engine.backward(loss, count=...): with {uneven.setting} losses are means over a "
                "micro-batch: the micro-batches of a step have equal weights; leave count out"
            )
        tokens = None if count is None else checked_count(count)
        parts = self.begin_loss(tokens, steps)
        self._prepare_backward(micro_batch)
        loss, root = self.loss_and_root(loss, divides=divides, count=tokens, parts=parts)
        if self._features.needs_graph and self._batches.is_gradient_accumulation_boundary():
            scale = self._scaling.factor / parts
            if divides and tokens is None:
                scale /= steps
            self._features.before_backward(root, scale, self._batches.global_steps)
        self._run_backward(lambda: torch.autograd.backward([root], [gradient], **options))
        if tokens is not None:
            self.counts.add(tokens)
        return loss

    def backward(self, roots: Any, gradients: Any, micro_batch: MicroBatch | None = None, **options: Any) -> None:
        """Backpropagates gradients that another part of the model computed. Every rank must call it.

        Args:
            roots: A tensor or tensors that some forward returned.
            gradients: One for each root, or None for a root that got none; scaled and divided already.
            micro_batch: The micro-batch of this backward; None: found by counting steps.
        """
        self._check_backward()
        tensors, their_gradients = paired_roots(roots, gradients)
        self.counts.note_gradients()
        self._prepare_backward(micro_batch)
        self._run_backward(lambda: torch.autograd.backward(tensors, their_gradients, **options))

    def run_backward(self, compute: Callable[[], _Computed], micro_batch: MicroBatch) -> _Computed:
        """Runs ``compute``, which contains a backward, and returns its result. Every rank must call it."""
        self._check_backward()
        self._prepare_backward(micro_batch)
        return self._run_backward(compute)

    def begin_loss(self, count: Any, micro_batches: int) -> float:
        """Returns the divisor of a loss before its backward: 1 for a mean.

        Raises:
            CallOrderError: Some losses of the update are sums with a count, and others are means.
        """
        if count is None:
            self.counts.note_mean()
            return 1.0
        return self.counts.begin_sum(count, micro_batches)

    def loss_and_root(
        self, loss: torch.Tensor, *, divides: bool = True, count: Any = None, parts: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reports a loss, and returns it with what is backpropagated.

        Args:
            loss: 0-dim or of one element.
            count: Tokens that it is a sum over, as :func:`checked_count` returns them; None: it is a mean.
            parts: With ``count``, what :meth:`begin_loss` returned.

        Returns:
            The loss divided by the accumulation steps, and that times the loss scale; with ``count``, the mean over its
            tokens, and the sum divided by ``parts`` times the loss scale.
        """
        if count is not None:
            mean = mean_of_sum(loss, count)
            self._progress.loss(mean / self._batches.gradient_accumulation_steps())
            return mean, self._scaling.apply(loss / parts)
        if (uneven := self._features.uneven_batch) is not None:
            loss = uneven.weigh(loss)
        elif divides and (steps := self._batches.gradient_accumulation_steps()) > 1:
            loss = loss / steps
        self._progress.loss(loss)
        return loss, self._scaling.apply(loss)

    def _refuse_destroyed(self, call: str) -> None:
        if self._runtime.is_destroyed:
            raise CallOrderError(
                f"{call}: this engine was destroyed, so the gradients of the ranks are not reduced any more; "
                "call engine.destroy() after the last step, or make another engine with deepspeed.initialize"
            )

    def _check_backward(self) -> None:
        """Raises if no backward can run now, and discards what the program has discarded by ``zero_grad``."""
        self._refuse_destroyed("engine.backward")
        if self._runtime.reducer is None:
            raise CallOrderError(
                "engine.backward: this engine has no optimizer, so nothing is trained; give initialize an optimizer or "
                "an `optimizer` section with trainable model_parameters"
            )
        self._runtime.refuse_offloaded("engine.backward", "lp_params", "lp_grads")
        self._runtime.reducer.program.apply()
        self._take_discards()  # before this loss counts, as a zero_grad forgets the losses so far

    def _prepare_backward(self, micro_batch: MicroBatch | None) -> None:
        if self._runtime.passes.calls:
            self._runtime.hooks.pause()
        self._runtime.leave_backward("engine.backward")
        self._runtime.drop_open_work()
        assert self._runtime.reducer is not None
        if micro_batch is not None and micro_batch.is_first and self._runtime.reducer.has_sums:
            raise CallOrderError(
                f"engine.backward: micro-batch {micro_batch.index} is marked as the first of an update, but gradients "
                "of earlier ones are not used yet; call engine.step() after the last of them, or engine.zero_grad()"
            )
        self._batches.scheduled = micro_batch

    def _run_backward(self, compute: Callable[[], _Computed]) -> _Computed:
        self._progress.before("backward")
        try:
            self._begin_backward()
            computed = compute()
        except RuntimeError as error:
            if (reason := reason_of(error)) is not None:
                raise reason from error
            raise
        self._close_backward()
        return computed

    @contextmanager
    def unreduced(self, call: str = "engine.no_sync") -> Iterator[None]:
        """Keeps backwards inside the block from reducing gradients; see :attr:`defers_reduction`.

        Raises:
            CallOrderError: Such a block is open already.
        """
        if self.defers_reduction:
            raise CallOrderError(
                f"{call}: a block of no_sync or coalesce_grad_reduction is already open; do not nest them"
            )
        self.defers_reduction = True
        try:
            yield
        finally:
            self.defers_reduction = False

    def open_backward(self) -> None:
        """Opens a backward that the program runs. Called when one reaches the outputs or a gradient arrives."""
        if self._runtime.reducer is None or self._features.runs_backward:
            return
        self._runtime.reducer.program.apply()
        self._take_discards()
        self._begin_backward(is_by_program=True)
        self._progress.before("backward")
        self._scaling.program_runs_backward()
        call_after_backward(self._close_backward)

    def _begin_backward(self, *, is_by_program: bool = False) -> None:
        # a driver or schedule that decides about steps handles the reminders
        if not self.defers_reduction and self._batches.counts_steps:
            self._missing_step.backward()
        unit = GradientUnit(is_scaled=self._scaling.factor != 1.0, is_counted=self.counts.has_sums)
        self._runtime.begin_backward(
            self._batches.micro_batch(),
            sync=self.reduces_gradients and not self.defers_reduction,
            unit=None if self.is_scheduled else unit,
            is_by_program=is_by_program,
        )
        self._batches.has_run_backward = True

    @contextmanager
    def one_reduction(self) -> Iterator[None]:
        """Sums the gradients of backwards inside the block and reduces the sum at its end, unless the block raises.

        At stages 0 and 1, where sums stay local until the boundary, a block before the boundary reduces nothing.
        """
        self._check_backward()
        reducer = self._runtime.reducer
        assert reducer is not None
        with self.unreduced("engine.coalesce_grad_reduction"):
            yield
        if reducer.policy.every_micro_batch or self._batches.is_gradient_accumulation_boundary():
            self._runtime.leave_backward("engine.coalesce_grad_reduction")
            reducer.settle()

    def _close_backward(self) -> None:
        if not self._runtime.in_backward:
            return  # it was dropped in between
        ended = self._runtime.end_backward()
        self._progress.after("backward")
        reducer = self._runtime.reducer
        if ended.is_by_program and reducer is not None and reducer.has_arrivals:
            self.counts.note_mean()  # skipped for torch.autograd.grad, which leaves no gradient in a parameter

    # -- update ------------------------------------------------------------------------------------------------------

    def update(self, *, extra: Sequence[float] = (), micro_batches: int | None = None) -> StepReport | None:
        """Updates the parameters at the boundary; otherwise counts a micro-step. Every rank must call it.

        Args:
            extra: Numbers for all ranks of the job, which the report gives back; every rank must give as many.
            micro_batches: Micro-batches that a schedule has run for this update; None: steps are counted.

        Returns:
            The report of the update; None before the boundary.

        Raises:
            CallOrderError: There is no optimizer, or the call is made inside ``no_sync`` or a backward.
        """
        self._refuse_destroyed("engine.step")
        if self._updater is None:
            raise CallOrderError("engine.step: this engine has no optimizer; see initialize(optimizer=...)")
        if self.defers_reduction:
            raise CallOrderError(
                "engine.step: called inside no_sync or coalesce_grad_reduction; leave the block before the update"
            )
        batches = self._batches
        if micro_batches is not None:
            batches.scheduled = MicroBatch(micro_batches - 1, is_first=False, is_last=True)
            batches.has_run_backward = True  # pipeline stages without trained parameters run no backward
        self._runtime.leave_backward("engine.step")
        self.was_applied = False
        self._missing_step.step()
        report = None
        if batches.is_gradient_accumulation_boundary():
            if not batches.has_run_backward:
                log_dist_once(
                    "engine.step: no backward has run since the last update, so there are no gradients; the update is "
                    "counted, and the schedule advances. Call engine.backward(loss) before each engine.step()",
                    level=logging.WARNING,
                )
            self._progress.before("step")
            report = self._update(extra)
            batches.has_run_backward = False
            self._progress.after("step")
        else:
            assert self._runtime.reducer is not None
            self._runtime.reducer.end_micro_step()
        batches.end_step(1 if micro_batches is None else micro_batches)
        return report

    def _update(self, extra: Sequence[float]) -> StepReport:
        self._features.before_update(self._batches.global_steps, has_run_backward=self._batches.has_run_backward)
        uneven = self._features.uneven_batch
        report = self.update_parameters((*extra, *(() if uneven is None else uneven.numbers())))
        if uneven is not None:
            uneven.take(report.extra)
        self.was_applied = not report.overflow
        self._batches.count_update(was_skipped=report.overflow)
        self._features.after_update(self._batches.global_steps, was_skipped=not self.was_applied)
        return report

    @torch.no_grad()
    def update_parameters(self, extra: Sequence[float] = ()) -> StepReport:
        """Updates the parameters by the gradients, without counting a step. Every rank must call it.

        The update divides the gradients of losses that are sums by their tokens on all ranks; those of means by 1.

        Raises:
            CallOrderError: A backward is still open, or a parameter got no gradient and must have one.
            DivergenceError: Ranks kept different orders of collectives.
            NonFiniteError: Too many skipped steps in a row, or an overflow at the minimum loss scale.
        """
        updater, reducer = self._updater, self._runtime.reducer
        assert updater is not None and reducer is not None
        self._runtime.leave_backward("optimizer.step")
        reducer.settle()
        self._take_discards()
        self.free_for_update()
        discards = reducer.discards
        try:
            exchanged = updater.exchange((*extra, *self.counts.numbers()))
            report = updater.apply(exchanged, self.counts.divisor_of(exchanged.extra))
            self.counts.end_update(report.extra)
        finally:
            if reducer.discards != discards:  # after some errors too
                self.forget_losses()
        return replace(report, extra=report.extra[:, : len(extra)])

    def zero_grad(self, call: str) -> None:
        """Discards every gradient, reduced or not."""
        self._runtime.leave_backward(call)
        if self._runtime.reducer is not None:
            self._runtime.reducer.zero_grad()
        self.forget_losses()

    def forget_losses(self) -> None:
        """Forgets the losses since the last update. Called when their gradients are discarded or were used."""
        self.counts.clear()
        self._scaling.clear()

    def _take_discards(self) -> None:
        """Forgets the losses of gradients that the program has discarded by torch's calls."""
        reducer, batches = self._runtime.reducer, self._batches
        assert reducer is not None
        discards = reducer.program.take_discards()
        if discards.all:
            self.forget_losses()
        if (discards.some or discards.all) and batches.since_update and batches.boundary is None:
            log_dist_once(
                f"zero_grad or grad = None after {batches.since_update} of gradient_accumulation_steps="
                f"{batches.gradient_accumulation_steps()} micro-batches: their gradients are discarded, and the update "
                "gets those of the remaining ones only. To accumulate, call zero_grad after the update (engine.step() "
                "has already discarded the gradients then, so the call can also be left out)",
                level=logging.WARNING,
            )

    def free_for_update(self) -> None:
        """Frees gathered parameters before they change. Called before updates, and before states are loaded.

        Raises:
            CallOrderError: The gradients come from a loss without the loss scale, or parameters are in use.
        """
        assert self._runtime.reducer is not None
        if self._scaling.saw_unscaled:
            self._runtime.reducer.clear()
            self.counts.clear()
        self._scaling.refuse_unscaled()
        self._missing_step.step()
        self._runtime.refuse_open_blocks("the update")
        self._runtime.refuse_offloaded("engine.step")
        if self._runtime.passes.calls:
            self._runtime.hooks.pause()
        self._runtime.free_gathered()
        self._runtime.take_back_frozen()
