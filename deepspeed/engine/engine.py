"""The engine: forward, backward and step of one model under ZeRO, each delegating to the part that owns the work."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.watch.trace_points import reason_of
from deepspeed.engine.accessors import ConfigAccessors
from deepspeed.engine.batches import Batches
from deepspeed.engine.checkpointing import EngineCheckpoints
from deepspeed.engine.compiling import EngineCompile, gathers_between_pieces
from deepspeed.engine.efficiency import Efficiency, EfficiencyAccess
from deepspeed.engine.flops import ProfiledStep
from deepspeed.engine.forwarded import forwarded
from deepspeed.engine.loading import EngineLoading
from deepspeed.engine.loss_scaling import LossScaling
from deepspeed.engine.mismatch import explain_mismatch
from deepspeed.engine.model_compression import pacing_of, schedule_of
from deepspeed.engine.offloading import EngineOffload
from deepspeed.engine.parts import EngineParts
from deepspeed.engine.progress import ProgressLog, StepFacts
from deepspeed.engine.queries import EngineQueries
from deepspeed.engine.reminders import MissingStep, RowCheck, hint_for, watch_other_optimizers
from deepspeed.engine.reports import state_text, summary
from deepspeed.engine.resuming import resume_from, subject_of
from deepspeed.engine.rooms import EXPERT, is_loaded
from deepspeed.engine.roots import check_loss, paired_roots
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.logging import log_dist, log_dist_once
from deepspeed.plain_attributes import PlainAttributes
from deepspeed.profiling.timer import ThroughputTimer
from deepspeed.zero.micro_batch import MicroBatch
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.update.optimizer import DeepSpeedZeroOptimizer

_Computed = TypeVar("_Computed")


class DeepSpeedEngine(ConfigAccessors, EfficiencyAccess, EngineQueries, PlainAttributes, nn.Module):
    """Wraps a model for training. Made by ``deepspeed.initialize``.

    Attributes unknown to the engine are those of the wrapped model.

    Attributes:
        module: The model.
        optimizer: The ZeRO optimizer; without one at stage 3 the machinery of sharded parameters, below it None.
        basic_optimizer: The torch optimizer underneath, or None.
        lr_scheduler: The schedule that ``step`` advances; may be set to None.
        training_dataloader: Loader over ``training_data``, or None.
        config: The configuration dict as it was given.
        global_steps: Updates so far, skipped ones included.
        global_samples: Samples of those updates, over all ranks.
        micro_steps: Calls of ``step`` so far.
        skipped_steps: Updates that were skipped because a gradient was not finite.
        device: Where the model computes.
        compression_scheduler: Switches the techniques of ``compression_training`` on; None for a model without.
    """

    def __init__(self, parts: EngineParts) -> None:
        super().__init__()
        self.module = parts.model
        self._parts = parts
        self._root = parts.parsed.root
        self._precision = parts.precision
        assert parts.parsed.batch is not None
        self._batches = Batches(
            parts.parsed.batch, parts.standing.data_size, is_counted=self._root.managed_gradient_accumulation
        )
        self._runtime: ZeroRuntime = parts.runtime
        self._efficiency = Efficiency(self._root, parts.model, parts.runtime, self._batches.train_batch_size())
        self.compression_scheduler = schedule_of(parts.model)
        self._pacing = pacing_of(self.compression_scheduler, parts.groups.peers)
        self._updater: DeepSpeedZeroOptimizer | None = parts.make_optimizer(self.backward, self._before_update)
        self._scaling = LossScaling(self._updater.loss_scaler if self._updater is not None else None)
        self.optimizer = parts.public_optimizer(self._updater)
        self.basic_optimizer = parts.torch_optimizer
        self.client_optimizer = parts.client.optimizer
        self.client_lr_scheduler = parts.client.lr_scheduler
        self.training_data = parts.client.training_data
        self.collate_fn = parts.client.collate_fn
        self.mpu = parts.client.mpu
        self.lr_scheduler = parts.make_scheduler()
        self._loading = EngineLoading(parts, self._batches, lambda: self.collate_fn)
        self.training_dataloader = self.deepspeed_io(self.training_data) if self.training_data is not None else None
        self.config: dict[str, Any] = parts.parsed.raw
        self.device = parts.device
        self.local_rank, self.global_rank = parts.local_rank, parts.global_rank
        self.world_size = parts.world_size
        self.global_steps = self.global_samples = self.skipped_steps = 0
        self.enable_backward_allreduce = True
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None
        self._managed_backward = False
        self._missing_step = MissingStep()
        self._row_check = RowCheck()
        self._in_forward = False  # of this engine; a whole training step may be part of it
        self._step_applied = False
        self._extra: Sequence[float] = ()  # for all ranks, beside the norm of the gradients
        self._is_destroyed = False
        self.monitor = parts.monitor
        self._progress = ProgressLog(self._root, self.monitor, self.global_rank == 0)
        self.timers = self._progress.timers
        # For programs that drive it or count epochs with it; the engine's own figure is in the log and the monitor.
        self.tput_timer = ThroughputTimer(self._root.timers.throughput, self.train_batch_size())
        self._profiled = ProfiledStep(self._root.flops_profiler, self) if self._root.flops_profiler.enabled else None
        self._checkpoints = EngineCheckpoints(
            parts,
            subject=partial(subject_of, self),
            resume=partial(resume_from, self),
            sums_are_open=lambda: self._batches.since_update > 0,
        )
        self._compiling = EngineCompile(self.module, gathers_between_pieces(parts.placement, parts.standing.zero_size))
        self._offloading = EngineOffload(parts)
        self._runtime.announcement.on_sight = self._open_backward
        self._runtime.optimizer = self._updater
        watch_other_optimizers()
        log_dist(summary(self._runtime, parts.placement, parts.standing, self._batches))
        if self._root.dump_state:
            log_dist(state_text(self._root, self.device, self.precision_report(), self.memory_report()))
        self._stopped_gc = self._root.disable_python_gc and gc.isenabled()
        if self._stopped_gc:
            gc.disable()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(
                f"neither the engine nor the wrapped {type(module).__name__} has {name!r}{hint_for(name)}"
            ) from None

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model; floating inputs are cast only where ``auto_cast`` (of ``fp16`` or ``bf16``) asks for it.

        Raises:
            DeepSpeedConfigError: The model was given floating tensors of another dtype than it computes in.
        """
        runtime, module = self._runtime, self.module
        runtime.refuse_away("engine.forward", "lp_params")
        if not runtime.backward_is_running:  # as it is where this forward is recomputed
            runtime.drop_open_work()
        runtime.places.take_back()
        self._check_rows(inputs, kwargs)
        if self._precision.cast_inputs:
            inputs, kwargs = self._precision.cast_arguments(inputs), self._precision.cast_arguments(kwargs)
        kwargs |= self._efficiency.before_forward(
            is_training=module.training, global_steps=self.global_steps, micro_steps=self.micro_steps
        )
        self._progress.before("forward")
        if self._profiled is not None:
            self._profiled.before_forward()
        self._in_forward = True
        try:
            with self._precision.forward_context(get_accelerator()):
                outputs = module(*inputs, **kwargs)
        except RuntimeError as error:
            if (reason := reason_of(error)) is not None:
                raise reason from error
            said = explain_mismatch(error, self._precision, inputs, kwargs)
            if said is None:
                raise
            raise DeepSpeedConfigError(said) from error
        finally:
            self._in_forward = False
        if self._profiled is not None:
            self._profiled.after_forward()
        self._progress.after("forward")
        if torch.is_grad_enabled() and not runtime.hooks.sees_forwards:
            self._let_announce(outputs)
        return outputs

    def _check_rows(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Warns once where the first training batch has other rows than the configured micro-batch."""
        if not self._row_check.is_done and self.module.training and self._updater is not None:
            self._row_check.compare((inputs, named), self.train_micro_batch_size_per_gpu())

    def _let_announce(self, outputs: Any) -> None:
        """Whatever backward the program runs through ``outputs`` shows itself."""
        self._runtime.announcement.watch(outputs)

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward(
        self,
        loss: Any,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        gradients: Any = None,
        micro_batch: MicroBatch | None = None,
        **kwargs: Any,
    ) -> Any:
        """Backpropagates ``loss`` and reduces gradients as the ZeRO stage says. Every rank must call it.

        Args:
            loss: Scalar; it is divided by ``gradient_accumulation_steps`` and multiplied by the loss scale. With
                ``gradients`` a tensor or a sequence of tensors that some forward returned.
            retain_graph: As in torch.
            scale_wrt_gas: False: do not divide.
            gradients: Of each tensor of ``loss``, or None for one that got none: those of a loss that another part of
                the model computed, scaled and divided already. Nothing of it is scaled or reported here.
            micro_batch: Where this backward stands in its update, said by a schedule that runs several forwards before
                their backwards; its last one is followed by one :meth:`step`. None: found by counting steps.
            **kwargs: Further arguments of ``Tensor.backward``.

        Returns:
            The loss divided by the accumulation steps, without the loss scale; with ``gradients``, ``loss``.
        """
        self._refuse_destroyed("engine.backward")
        if self._runtime.reducer is None:
            raise CallOrderError(
                "engine.backward: this engine has no optimizer, so nothing is trained; give initialize an optimizer or "
                "an `optimizer` section with trainable model_parameters"
            )
        self._runtime.refuse_away("engine.backward", "lp_params", "lp_grads")
        if gradients is not None:
            roots, given = paired_roots(loss, gradients)
        else:
            check_loss(loss, kwargs.get("gradient"))
        if self._in_forward:
            self._runtime.hooks.pause()
        self._runtime.leave_backward("engine.backward")
        self._runtime.drop_open_work()
        if micro_batch is not None and micro_batch.is_first and self._runtime.reducer.has_sums:
            raise CallOrderError(
                f"engine.backward: micro-batch {micro_batch.index} is said to be the first of an update, but gradients "
                "of earlier ones wait for theirs; call engine.step() after the last of them, or engine.zero_grad()"
            )
        self._batches.say(micro_batch)
        if gradients is None:
            if scale_wrt_gas and (steps := self.gradient_accumulation_steps()) > 1:
                loss = loss / steps
            self._progress.loss(loss)
            roots, given = [self._scaling.apply(loss)], [kwargs.pop("gradient", None)]
            self._pace(roots[0], scale_wrt_gas=scale_wrt_gas)
        self._run_backward(lambda: torch.autograd.backward(roots, given, retain_graph=retain_graph, **kwargs))
        return loss

    def _pace(self, root: torch.Tensor, *, scale_wrt_gas: bool) -> None:
        """Lets eigenvalues of the loss be measured before its graph is freed."""
        if self._pacing is None or not self._batches.present().is_last:
            return
        assert self.compression_scheduler is not None
        scale = self._scaling.factor
        if scale_wrt_gas:
            scale /= self.gradient_accumulation_steps()
        self._pacing.before_backward(root, scale, self.global_steps, self.compression_scheduler.training_steps)

    def _run_backward(self, compute: Callable[[], _Computed]) -> _Computed:
        """One backward of this engine; ``compute`` is whatever makes it up."""
        self._progress.before("backward")
        self._managed_backward = True
        try:
            self._open_backward()
            computed = compute()
        except RuntimeError as error:
            if (reason := reason_of(error)) is not None:
                raise reason from error
            raise
        finally:
            self._managed_backward = False
        self._close_backward()
        return computed

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a ``loss.backward()`` of one's own (unchanged unless fp16).

        Monitors and ``steps_per_print`` show it as they show what :meth:`backward` is given. Nothing else divides it by
        the accumulation steps.
        """
        self._progress.loss(loss)
        return self._scaling.apply_for_program(loss)

    def _open_backward(self) -> None:
        """A backward has begun: by ``engine.backward``, or seen at the outputs of forward."""
        if self._runtime.in_backward or self._runtime.reducer is None:
            return
        if self._pacing is not None and self._pacing.is_measuring:
            return
        batches = self._batches
        if batches.are_reduced and not batches.is_decided_outside:  # whoever decides about steps knows of them
            self._missing_step.backward()
        self._runtime.begin_backward(batches.present(), sync=batches.are_reduced and self.enable_backward_allreduce)
        batches.has_run_backward = True
        if self._managed_backward:
            return
        self._progress.before("backward")
        self._scaling.program_runs_backward()
        torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)

    def _close_backward(self) -> None:
        if self._runtime.in_backward:
            self._runtime.end_backward()
            self._progress.after("backward")

    @property
    def micro_steps(self) -> int:
        """Calls of :meth:`step` so far."""
        return self._batches.micro_steps

    @micro_steps.setter
    def micro_steps(self, count: int) -> None:
        self._batches.micro_steps = count

    is_gradient_accumulation_boundary = forwarded("_batches", Batches.is_gradient_accumulation_boundary)
    set_gradient_accumulation_boundary = forwarded("_batches", Batches.set_gradient_accumulation_boundary)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside reduce nothing at any stage; each rank keeps whole gradients until the next one outside."""
        whole = sum(bucket.layout.numel for bucket in self._runtime.buckets if bucket.layout.trainable)
        size = whole * self._precision.accumulate_dtype.itemsize
        log_dist_once(f"no_sync keeps whole gradients on every rank until the boundary: {size / 2**20:,.0f} MiB")
        with self._batches.unreduced():
            yield

    # -- step --------------------------------------------------------------------------------------------------------

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the boundary updates the parameters and advances the schedule; otherwise only counts.

        Args:
            lr_kwargs: Arguments for the schedule's ``step``.
        """
        self._refuse_destroyed("engine.step")
        if self._updater is None:
            raise CallOrderError("engine.step: this engine has no optimizer; see initialize(optimizer=...)")
        if not self._batches.are_reduced:
            raise CallOrderError("engine.step: called inside no_sync; leave it before the update")
        self._runtime.leave_backward("engine.step")
        self._step_applied = False
        self._missing_step.step()
        if self.is_gradient_accumulation_boundary():
            if not self._batches.has_run_backward:
                log_dist_once(
                    "engine.step: no backward has run since the last update, so there are no gradients; the update is "
                    "counted, and the schedule advances. Call engine.backward(loss) before each engine.step()",
                    level=logging.WARNING,
                )
            self._progress.before("step")
            self._update(lr_kwargs)
            self._batches.has_run_backward = False
            self._progress.after("step")
            self._report_step()
        else:
            self._runtime.reducer.end_micro_step()  # type: ignore[union-attr]
        self._batches.end_step()

    def _update(self, lr_kwargs: dict[str, Any] | None) -> None:
        assert self._updater is not None
        if self.compression_scheduler is not None:
            if self._pacing is not None and self._batches.has_run_backward:
                self._pacing.before_update(self.global_steps, self.compression_scheduler.training_steps)
            self.compression_scheduler.before_update()
        self._updater.update(self._extra)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._efficiency.at(self.global_steps)
        if self._updater.overflow:
            self.skipped_steps += 1
        else:
            self._step_applied = True
            if self.compression_scheduler is not None:
                self.compression_scheduler.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))

    def _expert_events(self) -> Sequence[tuple[str, float]]:
        """The loads of expert layers, for the monitors."""
        if not is_loaded(EXPERT):
            return ()
        from deepspeed.parallel.expert.loads import expert_events

        return expert_events(self.module)

    def _report_step(self) -> None:
        if self._profiled is not None:  # before the times of this update are set to zero
            self._profiled.after_update(self.global_steps)
        if self._progress.is_silent:
            return
        scaler = self._updater.loss_scaler if self._updater is not None else None
        self._progress.step(
            StepFacts(
                step=self.global_steps,
                samples=self.global_samples,
                batch=self.train_batch_size(),
                skipped=self.skipped_steps,
                lr=self.get_lr(),
                norm=self.get_global_grad_norm(),
                loss_scale=float(scaler.loss_scale) if scaler is not None else None,
                more=self._expert_events() if self.monitor.writes else (),
            )
        )

    @property
    def flops_profiler(self) -> Any:
        """The profiler of ``flops_profiler.profile_step``; None if the section is off or this is not rank 0."""
        return self._profiled.profiler if self._profiled is not None else None

    def _before_update(self) -> None:
        """Called by the optimizer's own ``step``, whoever calls that."""
        if self._scaling.saw_unscaled:
            self._runtime.reducer.clear()  # type: ignore[union-attr]
        self._scaling.refuse_unscaled()
        self._missing_step.step()
        self._runtime.refuse_open_blocks("the update")
        self._runtime.refuse_away("engine.step")
        if self._in_forward:
            self._runtime.hooks.pause()
        self._runtime.free_gathered()
        self._runtime.take_back_frozen()

    def was_step_applied(self) -> bool:
        """Whether the latest ``step`` changed the parameters."""
        return self._step_applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throws away every gradient."""
        self._runtime.leave_backward("engine.zero_grad")
        if self._runtime.reducer is not None:
            self._runtime.reducer.zero_grad()

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Reduces gradients that no boundary has reduced yet. Every rank must call it."""
        self._runtime.leave_backward("engine.allreduce_gradients")
        if self._runtime.reducer is not None:
            self._runtime.reducer.settle()

    # -- batch sizes -------------------------------------------------------------------------------------------------

    train_batch_size = forwarded("_batches", Batches.train_batch_size)
    train_micro_batch_size_per_gpu = forwarded("_batches", Batches.train_micro_batch_size_per_gpu)
    gradient_accumulation_steps = forwarded("_batches", Batches.gradient_accumulation_steps)
    get_batch_info = forwarded("_batches", Batches.get_batch_info)
    set_train_micro_batch_size = forwarded("_batches", Batches.set_train_micro_batch_size)
    set_train_batch_size = forwarded("_batches", Batches.set_train_batch_size)

    # -- data --------------------------------------------------------------------------------------------------------

    deepspeed_io = forwarded("_loading", EngineLoading.deepspeed_io)

    # -- modes -------------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Training mode, for the model too."""
        super().train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Evaluation mode, for the model too."""
        return self.train(False)

    compile = forwarded("_compiling", EngineCompile.compile)

    @property
    def is_compiled(self) -> bool:
        """Whether :meth:`compile` was called."""
        return self._compiling.is_done

    offload_states = forwarded("_offloading", EngineOffload.offload_states)
    reload_states = forwarded("_offloading", EngineOffload.reload_states)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    save_checkpoint = forwarded("_checkpoints", EngineCheckpoints.save_checkpoint)
    load_checkpoint = forwarded("_checkpoints", EngineCheckpoints.load_checkpoint)
    wait_for_checkpoint = forwarded("_checkpoints", EngineCheckpoints.wait_for_checkpoint)
    save_16bit_model = forwarded("_checkpoints", EngineCheckpoints.save_16bit_model)
    save_fp16_model = forwarded("_checkpoints", EngineCheckpoints.save_fp16_model)
    load_module_state_dict = forwarded("_checkpoints", EngineCheckpoints.load_module_state_dict)
    _zero3_consolidated_16bit_state_dict = forwarded(
        "_checkpoints", EngineCheckpoints._zero3_consolidated_16bit_state_dict
    )
    _consolidated_16bit_state_dict = forwarded("_checkpoints", EngineCheckpoints._consolidated_16bit_state_dict)

    module_state_dict = forwarded("_checkpoints", EngineCheckpoints.module_state_dict)

    # -- the end -----------------------------------------------------------------------------------------------------

    def collect_python_gc(self) -> None:
        """Runs Python's garbage collector now, for runs under ``disable_python_gc``."""
        gc.collect()

    def empty_partition_cache(self) -> None:
        """Frees every gathered parameter that is not in use."""
        self._runtime.drop_failed_backward()
        self._runtime.free_gathered()

    def _refuse_destroyed(self, call: str) -> None:
        if self._is_destroyed:
            raise CallOrderError(
                f"{call}: this engine was destroyed, so nothing brings the gradients of all ranks together any more; "
                "call engine.destroy() after the last step, or make another engine with deepspeed.initialize"
            )

    def destroy(self) -> None:
        """Takes all hooks from the model and frees buffers. May be called in any state, more than once.

        The model keeps what it holds: at stage 3 that is nothing of the parameters that are sharded (they are empty
        from then on), so save or gather them before. It is not trained any more: :meth:`backward` and :meth:`step`
        raise.
        """
        self._is_destroyed = True
        held = {id(parameter) for parameter in self.module.parameters()}  # without those that were replaced since
        empty = sum(
            tile.numel
            for bucket in self._runtime.buckets
            if bucket.is_sharded
            for parameter, tile in zip(bucket.params, bucket.layout.tiles, strict=True)
            if id(parameter) in held
        )
        if empty and not self._runtime.is_retired:
            log_dist_once(
                f"engine.destroy: {empty:,} parameters of the model were sharded and are empty from now on; what is to "
                "be used later must be saved before (save_checkpoint, save_16bit_model) or copied inside "
                "deepspeed.zero.GatheredParameters"
            )
        with ExitStack() as last_first:  # each of them, also after one that failed because another rank has died
            last_first.callback(self._parts.groups.give_back)
            last_first.callback(self.monitor.close)
            last_first.callback(self._progress.close)
            last_first.callback(self._parts.homes.close)
            if self._updater is not None:
                last_first.callback(self._updater.destroy)
            last_first.callback(self._runtime.destroy)
            if not self._runtime.is_retired:
                last_first.callback(self._runtime.drop_open_work, together=False)
            last_first.callback(self._checkpoints.close)
            last_first.callback(self._parts.claim.give_up)
            if self._stopped_gc:
                self._stopped_gc = False
                last_first.callback(gc.enable)
