"""The engine: ``EngineBase``, which pipelines share, and ``DeepSpeedEngine``, which the program steps itself."""

from __future__ import annotations

import gc
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import nn
from typing_extensions import Self

from deepspeed.accelerator import get_accelerator
from deepspeed.engine.accessors import ConfigAccessors
from deepspeed.engine.batches import Batches
from deepspeed.engine.checkpointing import EngineCheckpoints
from deepspeed.engine.compiling import EngineCompile, gathers_between_graphs
from deepspeed.engine.efficiency import EfficiencyAccess
from deepspeed.engine.flops import ProfiledStep
from deepspeed.engine.forwarding import forwarded, forwarded_attribute
from deepspeed.engine.inspection import EngineInspection
from deepspeed.engine.loading import EngineLoading
from deepspeed.engine.loss_counter import LossCounter
from deepspeed.engine.loss_scaling import LossScaling
from deepspeed.engine.offloading import EngineOffload
from deepspeed.engine.parts import EngineParts
from deepspeed.engine.progress import ProgressLog
from deepspeed.engine.queries import EngineQueries
from deepspeed.engine.reminders import hint_for, watch_other_optimizers
from deepspeed.engine.reports import accumulation_note, state_text, summary
from deepspeed.engine.resuming import resume_from, run_state_of
from deepspeed.engine.train_step import TrainStep
from deepspeed.engine.zero_optimizer import DeepSpeedZeroOptimizer, optimizer_class
from deepspeed.engine_feature import StepInfo
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.give_base import PlainAttributes
from deepspeed.logging import log_dist, log_dist_once
from deepspeed.profiling.timer import ThroughputTimer
from deepspeed.zero.access.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.zero.runtime import MicroBatch, ZeroRuntime

if TYPE_CHECKING:
    from deepspeed.parallel.expert.replay import RouterReplay

MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000


class EngineBase(ConfigAccessors, EfficiencyAccess, EngineQueries, PlainAttributes, nn.Module):
    """Wraps a model for training. Subclasses add forward, backward and step, run by their :class:`TrainStep`.

    Attributes unknown to the engine are those of the wrapped model; :class:`~deepspeed.engine.engine.DeepSpeedEngine`
    lists its own.
    """

    _is_scheduled = True  # a schedule runs backwards and updates; the program has no call between them

    def __init__(self, parts: EngineParts) -> None:
        super().__init__()
        self.module = parts.model
        self._parts = parts
        self._root = parts.parsed.root
        self._precision = parts.precision
        assert parts.parsed.batch is not None
        self._batches = Batches(
            parts.parsed.batch, parts.coordinates.data_size, is_counted=self._root.managed_gradient_accumulation
        )
        self._runtime: ZeroRuntime = parts.runtime
        batch_size = self._batches.train_batch_size()
        self._hooks = parts.features.hooks(parts.setup, parts.runtime, parts.groups, batch_size)
        self._updater = parts.runtime.updater
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
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None
        self.monitor = parts.monitor
        self._progress = ProgressLog(self._root, self.monitor, self.global_rank == 0, self._hooks.trackers)
        self.timers = self._progress.timers
        # For programs that drive it or count epochs with it; the engine's own figure is in the log and the monitor.
        self.tput_timer = ThroughputTimer(self._root.timers.throughput, self.train_batch_size())
        self._train_step = self._make_train_step()
        self._checkpoints = EngineCheckpoints(
            parts,
            self._progress,
            run_state=partial(run_state_of, self),
            resume=partial(resume_from, self),
            batches=self._batches,
        )
        self._compiling = EngineCompile(
            self.module, self._root.compile, gathers_between_graphs(parts.placement, parts.coordinates.zero_size)
        )
        self._offloading = EngineOffload(parts, self._progress)
        watch_other_optimizers()
        log_dist(summary(self._runtime, parts.placement, parts.coordinates, self._batches))
        steps = self.gradient_accumulation_steps()
        if note := accumulation_note(self._runtime, parts.placement, self._precision, steps):
            log_dist(note)
        if self._root.dump_state:
            log_dist(state_text(self._root, self.device, self.precision_report(), self.memory_report()))
        self._stopped_gc = self._root.disable_python_gc and gc.isenabled()
        if self._stopped_gc:
            gc.disable()
        self._optimizer: DeepSpeedZeroOptimizer | None = None
        if parts.torch_optimizer is not None:
            made = optimizer_class(parts.torch_optimizer, parts.placement, parts.precision)
            self._optimizer = made(self._runtime, self._train_step, self._offloading)
        self.optimizer: Any = self._optimizer
        if self._optimizer is None and parts.placement.shard_params:
            self.optimizer = DeepSpeedZeRoOffload.of(self._runtime)

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

    def _make_train_step(self) -> TrainStep:
        settings = self._root.flops_profiler
        efficiency = self._root.data_efficiency
        packs_tokens = efficiency is not None and efficiency.packs_tokens
        return TrainStep(
            self._runtime,
            self._batches,
            LossScaling(self._updater.loss_scaler if self._updater is not None else None),
            self._progress,
            precision=self._precision,
            hooks=self._hooks,
            profiled=ProfiledStep(settings, self) if settings.enabled else None,
            counts=self._make_loss_counter(),
            checks_rows=not packs_tokens,
            is_scheduled=self._is_scheduled,
        )

    def _make_loss_counter(self) -> LossCounter:
        return LossCounter(self._runtime)

    # -- where the training is ---------------------------------------------------------------------------------------

    global_steps = forwarded_attribute("_batches", "global_steps", "Updates so far, skipped ones included.")
    global_samples = forwarded_attribute("_batches", "global_samples", "Samples of those updates, over all ranks.")
    skipped_steps = forwarded_attribute("_batches", "skipped_steps", "Updates that were skipped.")
    micro_steps = forwarded_attribute("_batches", "micro_steps", "Calls of ``step`` so far, or micro-batches.")
    enable_backward_allreduce = forwarded_attribute(
        "_train_step", "reduces_gradients", "Whether backwards reduce gradients."
    )
    is_gradient_accumulation_boundary = forwarded("_batches", Batches.is_gradient_accumulation_boundary)
    set_gradient_accumulation_boundary = forwarded("_batches", Batches.set_gradient_accumulation_boundary)
    scale = forwarded("_train_step", TrainStep.scale)

    def inspect(self) -> EngineInspection:
        """Returns the parts whose memory and traffic the planner counts."""
        return EngineInspection(
            root=self._root,
            precision=self._precision,
            groups=self._parts.groups,
            buckets=self._runtime.buckets,
            memory_tracker=self._runtime.memory_tracker,
            updater=self._updater,
            driver=self._parts.driver,
            reducer=self._runtime.reducer,
        )

    # -- updates -----------------------------------------------------------------------------------------------------

    def _end_step(self, lr_arguments: Mapping[str, Any] | None = None) -> None:
        """Ends a step that made an update or skipped it. May end the process (:mod:`deepspeed.preemption`)."""
        if self.lr_scheduler is not None and self._train_step.was_applied:
            self.lr_scheduler.step(**(lr_arguments or {}))
        self._report_step()
        self._hooks.after_step(self.global_steps)

    def _report_step(self) -> None:
        if self._train_step.profiled is not None:  # before the times of this update are set to zero
            self._train_step.profiled.after_update(self.global_steps)
        if self._progress.is_silent:
            return
        scaler = self._updater.loss_scaler if self._updater is not None else None
        self._progress.step(
            StepInfo(
                step=self.global_steps,
                samples=self.global_samples,
                batch=self.train_batch_size(),
                own_batch=self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps(),
                skipped=self.skipped_steps,
                lr=self.get_lr(),
                norm=self.get_global_grad_norm(),
                loss_scale=float(scaler.loss_scale) if scaler is not None else None,
                more=self._hooks.events() if self._progress.uses_events else (),
            )
        )
        self._progress.memory(self.memory_report)

    @property
    def flops_profiler(self) -> Any:
        """The profiler of ``flops_profiler.profile_step``; None if the section is off or this is not rank 0."""
        profiled = self._train_step.profiled
        return profiled.profiler if profiled is not None else None

    def was_step_applied(self) -> bool:
        """Returns whether the latest ``step`` changed the parameters."""
        return self._train_step.was_applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards every gradient."""
        self._train_step.zero_grad("engine.zero_grad")

    def allreduce_gradients(self, bucket_size: int = MEMORY_OPT_ALLREDUCE_SIZE) -> None:
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

    def train(self, mode: bool = True) -> Self:
        """Sets the training mode of the engine and the model."""
        super().train(mode)
        return self

    def eval(self) -> Self:
        """Sets the evaluation mode of the engine and the model."""
        return self.train(False)

    compile = forwarded("_compiling", EngineCompile.compile)
    compile_report = forwarded("_compiling", EngineCompile.compile_report)

    @property
    def is_compiled(self) -> bool:
        """Returns whether :meth:`compile` was called, or the configuration compiles the model."""
        return self._compiling.is_done

    offload_states = forwarded("_offloading", EngineOffload.offload_states)
    reload_states = forwarded("_offloading", EngineOffload.reload_states)
    sleep = forwarded("_offloading", EngineOffload.sleep)
    wake = forwarded("_offloading", EngineOffload.wake)

    @cached_property
    def router(self) -> RouterReplay:
        """Records which experts tokens go to, and sends tokens to recorded ones (router replay)."""
        from deepspeed.parallel.expert.replay import RouterReplay

        return RouterReplay(self.module)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    save_checkpoint = forwarded("_checkpoints", EngineCheckpoints.save_checkpoint)
    load_checkpoint = forwarded("_checkpoints", EngineCheckpoints.load_checkpoint)
    wait_for_checkpoint = forwarded("_checkpoints", EngineCheckpoints.wait_for_checkpoint)
    save_16bit_model = forwarded("_checkpoints", EngineCheckpoints.save_16bit_model)
    export_weights = forwarded("_checkpoints", EngineCheckpoints.export_weights)
    weight_metadata = forwarded("_checkpoints", EngineCheckpoints.weight_metadata)
    export_delta = forwarded("_checkpoints", EngineCheckpoints.export_delta)
    save_fp16_model = forwarded("_checkpoints", EngineCheckpoints.save_fp16_model)
    load_module_state_dict = forwarded("_checkpoints", EngineCheckpoints.load_module_state_dict)
    _zero3_consolidated_16bit_state_dict = forwarded(
        "_checkpoints", EngineCheckpoints._zero3_consolidated_16bit_state_dict
    )
    _consolidated_16bit_state_dict = forwarded("_checkpoints", EngineCheckpoints._consolidated_16bit_state_dict)

    module_state_dict = forwarded("_checkpoints", EngineCheckpoints.module_state_dict)

    @property
    def weight_version(self) -> str:
        """The version of the weights: another one after each update and load, and of each engine; equal on all ranks.

        Writes of the program itself change it at the next :meth:`export_delta`.
        """
        return self._checkpoints.weight_version

    checkpoint_engine = forwarded_attribute(
        "_checkpoints",
        "engine",
        "Stores state dicts by path: torch's files, or an object of a class derived from ``CheckpointEngine`` that a "
        "program assigns, the same class on every rank. That one stores and loads the tensors of "
        ":meth:`save_checkpoint` and :meth:`load_checkpoint`; None goes back to files.",
    )

    # -- the end -----------------------------------------------------------------------------------------------------

    def collect_python_gc(self) -> None:
        """Runs Python's garbage collector now, for runs under ``disable_python_gc``."""
        gc.collect()

    def empty_partition_cache(self) -> None:
        """Frees every gathered parameter that is not in use."""
        self._runtime.drop_failed_backward()
        self._runtime.free_gathered()

    def destroy(self) -> None:
        """Takes all hooks from the model and frees buffers. May be called in any state, more than once.

        At stage 3 sharded parameters of the model are empty afterwards, so save or gather them before. :meth:`backward`
        and :meth:`step` raise from then on.
        """
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
        with ExitStack() as last_first:  # run all callbacks, even if one fails because another rank has died
            last_first.callback(self._hooks.close)
            last_first.callback(self._parts.groups.give_back)
            last_first.callback(self.monitor.close)
            last_first.callback(self._progress.close)
            last_first.callback(self._parts.tiers.close)
            if self._optimizer is not None:
                last_first.callback(self._optimizer.destroy)
            last_first.callback(self._runtime.destroy)
            if not self._runtime.is_retired:
                last_first.callback(self._runtime.drop_open_work, together=False)
            last_first.callback(self._checkpoints.close)
            last_first.callback(self._parts.claim.give_up)
            if self._stopped_gc:
                self._stopped_gc = False
                last_first.callback(gc.enable)


class DeepSpeedEngine(EngineBase, metaclass=ABCMeta):
    """Wraps a model for training. Made by ``deepspeed.initialize``.

    ``isinstance`` holds for engines of pipelines too, which are registered here and share :class:`EngineBase`.

    Attributes unknown to the engine are those of the wrapped model.

    Attributes:
        module: The model.
        optimizer: The ZeRO optimizer; without one at stage 3 the machinery of sharded parameters, below it None.
        basic_optimizer: The torch optimizer underneath, or None.
        lr_scheduler: The schedule that ``step`` advances; may be set to None.
        training_dataloader: Loader over ``training_data``, or None.
        config: The configuration dict as it was given.
        device: Where the model computes.
    """

    _is_scheduled = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model; floating inputs are cast only if ``auto_cast`` (of ``fp16`` or ``bf16``) is set.

        Raises:
            DeepSpeedConfigError: The model was given floating tensors of another dtype than it computes in.
        """
        return self._train_step.forward(self.module, inputs, kwargs, is_training=self.module.training)

    def backward(
        self,
        loss: Any,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        count: Any = None,
        gradients: Any = None,
        micro_batch: MicroBatch | None = None,
        **kwargs: Any,
    ) -> Any:
        """Backpropagates ``loss`` and reduces gradients by the rules of the ZeRO stage. Every rank must call it.

        Args:
            loss: Scalar; it is divided by ``gradient_accumulation_steps`` and multiplied by the loss scale. With
                ``gradients`` a tensor or a sequence of tensors that some forward returned.
            retain_graph: As in torch.
            scale_wrt_gas: False: do not divide.
            count: Tokens (or samples) that ``loss`` is a *sum* over, on this rank; a number or a tensor of one element.
                The update then divides the sum of all losses by the sum of all counts, over ranks and micro-batches.
                Gradients that are read before the step are not divided yet. None: ``loss`` is a mean.
            gradients: One for each tensor of ``loss``, or None for a tensor that got none: those of a loss that another
                part of the model computed, scaled and divided already. Nothing of it is scaled or reported here.
            micro_batch: The micro-batch of this backward, given by a schedule that runs several forwards before their
                backwards; its last one is followed by one :meth:`step`. None: found by counting steps.
            **kwargs: Further arguments of ``Tensor.backward``.

        Returns:
            The loss divided by the accumulation steps, without the loss scale; with ``gradients``, ``loss``; with
            ``count``, the mean over this rank's tokens.

        Raises:
            CallOrderError: Some losses of an update have a count, and others have none.
            DeepSpeedConfigError: Both ``gradients`` and ``count`` are given.
        """
        if gradients is not None:
            if count is not None:
                raise DeepSpeedConfigError(
                    "engine.backward: gradients and count are both given; count belongs to a loss, gradients come from "
                    "a loss that another part of the model computed. Give one of them"
                )
            self._train_step.backward(loss, gradients, micro_batch, retain_graph=retain_graph, **kwargs)
            return loss
        return self._train_step.backward_of_loss(
            loss, micro_batch, divides=scale_wrt_gas, count=count, retain_graph=retain_graph, **kwargs
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside reduce nothing at any stage; each rank keeps whole gradients until the next one outside."""
        whole = sum(bucket.layout.numel for bucket in self._runtime.buckets if bucket.layout.trainable)
        size = whole * self._precision.accumulate_dtype.itemsize
        log_dist_once(f"no_sync keeps whole gradients on every rank until the boundary: {size / 2**20:,.0f} MiB")
        with self._train_step.unreduced():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backwards inside add up on each rank; at the end of the block their sum is reduced once, at every stage.

        For losses that need several backwards before one :meth:`step`: cached contrastive losses, GANs, distillation.
        Each rank keeps whole gradients inside the block. Every rank must use it alike, with as many backwards. After an
        exception nothing is reduced.

        Raises:
            CallOrderError: Inside ``no_sync`` or another such block, or the engine trains nothing.
        """
        with self._train_step.one_reduction():
            yield

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Updates the parameters and advances the schedule at the boundary; otherwise only counts."""
        if self._train_step.update() is not None:
            self._end_step(lr_kwargs)


def autocast_if_enabled(engine: DeepSpeedEngine) -> AbstractContextManager[Any]:
    """Returns the context of ``torch_autocast`` for computations outside of the engine's forward, or an empty one."""
    return engine._precision.forward_context(get_accelerator())
