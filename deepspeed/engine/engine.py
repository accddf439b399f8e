"""The engine: forward, backward and step of one model under ZeRO, each delegating to the part that owns the work."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.load import Loaded
from deepspeed.checkpoint.subject import COUNTERS, Subject
from deepspeed.config import ParsedConfig
from deepspeed.engine.accessors import ConfigAccessors
from deepspeed.engine.build import EngineParts
from deepspeed.engine.checkpointing import EngineCheckpoints
from deepspeed.engine.compiling import EngineCompile, gathers_between_pieces
from deepspeed.engine.efficiency import Efficiency, EfficiencyAccess
from deepspeed.engine.flops import ProfiledStep
from deepspeed.engine.forwarded import forwarded
from deepspeed.engine.mismatch import explain_mismatch
from deepspeed.engine.offloading import EngineOffload
from deepspeed.engine.progress import ProgressLog, StepFacts
from deepspeed.engine.queries import EngineQueries
from deepspeed.engine.reminders import MissingStep, watch_other_optimizers
from deepspeed.engine.reports import memory_rows, precision_rows, state_text
from deepspeed.engine.roots import check_loss, paired_roots
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.logging import log_dist, log_dist_once
from deepspeed.profiling.timer import ThroughputTimer
from deepspeed.release import VERSION
from deepspeed.zero.access.whole_buckets import iter_full
from deepspeed.zero.micro_batch import MicroBatch
from deepspeed.zero.optimizer import DeepSpeedZeroOptimizer
from deepspeed.zero.runtime import ZeroRuntime


class DeepSpeedEngine(ConfigAccessors, EfficiencyAccess, EngineQueries, nn.Module):
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
    """

    def __init__(self, parts: EngineParts) -> None:
        super().__init__()
        self.module = parts.model
        self._parts = parts
        self._parsed: ParsedConfig = parts.parsed
        self._root = parts.parsed.root
        self._precision = parts.precision
        assert parts.parsed.batch is not None
        self._batch = parts.parsed.batch
        self._accumulation_steps = self._batch.accumulation_steps
        self._runtime: ZeroRuntime = parts.runtime
        self._efficiency = Efficiency(self._root, parts.model, parts.runtime)
        self._updater: DeepSpeedZeroOptimizer | None = parts.make_optimizer(self.backward, self._before_update)
        self.optimizer = parts.public_optimizer(self._updater)
        self.basic_optimizer = parts.torch_optimizer
        self.client_optimizer = parts.client.optimizer
        self.client_lr_scheduler = parts.client.lr_scheduler
        self.training_data = parts.client.training_data
        self.collate_fn = parts.client.collate_fn
        self.mpu = parts.client.mpu
        self.lr_scheduler = parts.make_scheduler()
        self.training_dataloader = self.deepspeed_io(self.training_data) if self.training_data is not None else None
        self.config: dict[str, Any] = parts.parsed.raw
        self.device = parts.device
        self.local_rank, self.global_rank = parts.local_rank, parts.global_rank
        self.world_size = parts.world_size
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self.enable_backward_allreduce = True
        self.loaded_checkpoint_dp_world_size: int | None = None
        self.loaded_checkpoint_mp_world_size: int | None = None
        self._boundary_override: bool | None = None
        self._said: MicroBatch | None = None  # by the driver of the last backward, until the next one or a step
        self._accumulates_from = 0  # ``micro_steps`` from which on the present accumulation steps are counted
        self._sync = True
        self._managed_backward = False
        self._has_run_backward = False  # since the last update
        self._missing_step = MissingStep()
        self._in_forward = False  # of this engine; a whole training step may be part of it
        self._scaled_losses = 0
        self._saw_unscaled_backward = False
        self._step_applied = False
        self.monitor = parts.monitor
        self._progress = ProgressLog(self._root, self.monitor, self.global_rank == 0)
        self.timers = self._progress.timers
        # For programs that drive it or count epochs with it; the engine's own figure is in the log and the monitor.
        self.tput_timer = ThroughputTimer(self._root.timers.throughput, self.train_batch_size())
        self._profiled = ProfiledStep(self._root.flops_profiler, self) if self._root.flops_profiler.enabled else None
        self._checkpoints = EngineCheckpoints(
            parts,
            subject=self._subject,
            resume=self._resume_from,
            sums_are_open=lambda: self._micro_steps_since_update > 0,
        )
        self._compiling = EngineCompile(self.module, gathers_between_pieces(parts.placement, parts.standing.zero_size))
        self._offloading = EngineOffload(parts)
        self._runtime.announcement.on_sight = self._open_backward
        self._runtime.optimizer = self._updater
        watch_other_optimizers()
        log_dist(self._summary())
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
            raise AttributeError(f"neither the engine nor the wrapped {type(module).__name__} has {name!r}") from None

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model; floating inputs are cast only where ``auto_cast`` (of ``fp16`` or ``bf16``) asks for it.

        Raises:
            DeepSpeedConfigError: The model was given floating tensors of another dtype than it computes in.
        """
        self._runtime.refuse_away("engine.forward", "lp_params")
        if not self._runtime.backward_is_running:  # as it is where this forward is recomputed
            self._runtime.drop_open_work()
        self._runtime.places.take_back()
        if self._precision.cast_inputs:
            inputs, kwargs = self._precision.cast_arguments(inputs), self._precision.cast_arguments(kwargs)
        kwargs |= self._efficiency.before_forward(
            is_training=self.module.training, global_steps=self.global_steps, micro_steps=self.micro_steps
        )
        self._progress.before("forward")
        if self._profiled is not None:
            self._profiled.before_forward()
        self._in_forward = True
        try:
            with self._precision.forward_context(get_accelerator()):
                outputs = self.module(*inputs, **kwargs)
        except RuntimeError as error:
            said = explain_mismatch(error, self._precision, inputs, kwargs)
            if said is None:
                raise
            raise DeepSpeedConfigError(said) from error
        finally:
            self._in_forward = False
        if self._profiled is not None:
            self._profiled.after_forward()
        self._progress.after("forward")
        if torch.is_grad_enabled() and not self._runtime.hooks.sees_forwards:
            self._runtime.announcement.watch(outputs)
        return outputs

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
        self._said = micro_batch
        if gradients is None:
            if scale_wrt_gas and self._accumulation_steps > 1:
                loss = loss / self._accumulation_steps
            self._progress.loss(loss)
            scaler = self._updater.loss_scaler if self._updater is not None else None
            roots, given = [scaler.scale_loss(loss) if scaler is not None else loss], [kwargs.pop("gradient", None)]
        self._progress.before("backward")
        self._managed_backward = True
        try:
            self._open_backward()
            torch.autograd.backward(roots, given, retain_graph=retain_graph, **kwargs)
        finally:
            self._managed_backward = False
        self._close_backward()
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for a ``loss.backward()`` of one's own (unchanged unless fp16).

        Monitors and ``steps_per_print`` show it as they show what :meth:`backward` is given. Nothing else divides it by
        the accumulation steps.
        """
        self._progress.loss(loss)
        self._scaled_losses += 1
        scaler = self._updater.loss_scaler if self._updater is not None else None
        return scaler.scale_loss(loss) if scaler is not None else loss

    def _open_backward(self) -> None:
        """A backward has begun: by ``engine.backward``, or seen at the outputs of forward."""
        if self._runtime.in_backward or self._runtime.reducer is None:
            return
        if self._sync and self._boundary_override is None:  # whoever decides about steps knows of them
            self._missing_step.backward()
        self._runtime.begin_backward(self._micro_batch(), sync=self._sync and self.enable_backward_allreduce)
        self._has_run_backward = True
        if self._managed_backward:
            return
        self._progress.before("backward")
        if self._updater is not None and self._updater.loss_scaler is not None:
            if self._scaled_losses > 0:
                self._scaled_losses -= 1
            else:
                self._saw_unscaled_backward = True
        torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)

    def _close_backward(self) -> None:
        if self._runtime.in_backward:
            self._runtime.end_backward()
            self._progress.after("backward")

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present micro-step ends in an update."""
        if self._said is not None:
            return self._said.is_last
        if self._boundary_override is not None:
            return self._boundary_override
        if not self._root.managed_gradient_accumulation:
            return True
        return self._micro_steps_since_update + 1 == self._accumulation_steps

    def _micro_batch(self) -> MicroBatch:
        """As its driver has said, or else by counting the calls of ``step``."""
        return self._said or MicroBatch(
            self._micro_steps_since_update,
            is_first=not self._has_run_backward,
            is_last=self.is_gradient_accumulation_boundary(),
        )

    @property
    def _micro_steps_since_update(self) -> int:
        return (self.micro_steps - self._accumulates_from) % self._accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decides from outside, until called again, whether micro-steps end in an update."""
        self._boundary_override = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside reduce nothing at any stage; each rank keeps whole gradients until the next one outside."""
        if not self._sync:
            raise CallOrderError("engine.no_sync: it is already open; do not nest it")
        whole = sum(bucket.layout.numel for bucket in self._runtime.buckets if bucket.layout.trainable)
        size = whole * self._precision.accumulate_dtype.itemsize
        log_dist_once(f"no_sync keeps whole gradients on every rank until the boundary: {size / 2**20:,.0f} MiB")
        self._sync = False
        try:
            yield
        finally:
            self._sync = True

    # -- step --------------------------------------------------------------------------------------------------------

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """At the boundary updates the parameters and advances the schedule; otherwise only counts.

        Args:
            lr_kwargs: Arguments for the schedule's ``step``.
        """
        if self._updater is None:
            raise CallOrderError("engine.step: this engine has no optimizer; see initialize(optimizer=...)")
        if not self._sync:
            raise CallOrderError("engine.step: called inside no_sync; leave it before the update")
        self._runtime.leave_backward("engine.step")
        self._step_applied = False
        self._missing_step.step()
        if self.is_gradient_accumulation_boundary():
            if not self._has_run_backward:
                log_dist_once(
                    "engine.step: no backward has run since the last update, so there are no gradients; the update is "
                    "counted, and the schedule advances. Call engine.backward(loss) before each engine.step()",
                    level=logging.WARNING,
                )
            self._progress.before("step")
            self._update(lr_kwargs)
            self._has_run_backward = False
            self._progress.after("step")
            self._report_step()
        else:
            self._runtime.reducer.end_micro_step()  # type: ignore[union-attr]
        self.micro_steps += 1
        if self._said is not None and self._said.is_last:
            self._accumulates_from = self.micro_steps  # whoever counts steps after this begins here
        self._said = None

    def _update(self, lr_kwargs: dict[str, Any] | None) -> None:
        assert self._updater is not None
        self._updater.step()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._efficiency.at(self.global_steps)
        if self._updater.overflow:
            self.skipped_steps += 1
        else:
            self._step_applied = True
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**(lr_kwargs or {}))

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
            )
        )

    @property
    def flops_profiler(self) -> Any:
        """The profiler of ``flops_profiler.profile_step``; None if the section is off or this is not rank 0."""
        return self._profiled.profiler if self._profiled is not None else None

    def _before_update(self) -> None:
        """Called by the optimizer's own ``step``, whoever calls that."""
        if self._saw_unscaled_backward:
            self._saw_unscaled_backward = False
            self._runtime.reducer.clear()  # type: ignore[union-attr]
            raise CallOrderError(
                "fp16: the gradients come from a loss.backward() whose loss was not scaled; small gradients would have "
                "become zero. Write engine.scale(loss).backward(), or engine.backward(loss)"
            )
        self._scaled_losses = 0
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

    def get_global_grad_norm(self) -> float | None:
        """Unscaled norm of the gradients of the latest update, before clipping; None before the first."""
        if self._updater is None or self._updater.last_report is None:
            return None
        return self._updater.last_report.norm

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

    def train_batch_size(self) -> int:
        """Samples per update over all ranks."""
        return self._batch.micro_batch_size * self._accumulation_steps * self.dp_world_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per forward on one rank."""
        return self._batch.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per update."""
        return self._accumulation_steps

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the micro-batch and keeps the accumulation steps; the global batch follows."""
        if micro_batch_size <= 0:
            raise DeepSpeedConfigError(f"set_train_micro_batch_size({micro_batch_size}): expected a positive number")
        self._batch = replace(self._batch, micro_batch_size=micro_batch_size)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Global batch, micro-batch, accumulation steps."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the global batch by changing the accumulation steps; micro-steps since the last update count.

        Raises:
            DeepSpeedConfigError: It is not a multiple of micro-batch times ranks.
        """
        per_pass = self._batch.micro_batch_size * self.dp_world_size
        if train_batch_size <= 0 or train_batch_size % per_pass:
            raise DeepSpeedConfigError(
                f"set_train_batch_size({train_batch_size}): expected a positive multiple of micro-batch "
                f"{self._batch.micro_batch_size} x ranks {self.dp_world_size} = {per_pass}"
            )
        self._accumulates_from = self.micro_steps - self._micro_steps_since_update
        self._accumulation_steps = train_batch_size // per_pass

    # -- data --------------------------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """A loader that gives each rank its share of ``dataset``."""
        from deepspeed.data import DeepSpeedDataLoader

        loader = DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=batch_size or self._batch.micro_batch_size,
            pin_memory=pin_memory and self._parts.device.type != "cpu",
            data_sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_parallel_rank=self._parts.standing.data_rank,
            data_parallel_world_size=self.dp_world_size,
            drop_last=self._root.dataloader_drop_last,
            shuffle=route == "train",
        )
        if isinstance(dataset, Sized) and len(loader) == 0:
            log_dist(
                f"the data loader gives no batch: the dataset has {len(dataset)} sample(s) for {self.dp_world_size} "
                f"rank(s) with batches of {loader.batch_size}"
                + (", and dataloader_drop_last leaves out what does not fill one" if len(dataset) else ""),
                level=logging.WARNING,
            )
        return loader

    @property
    def param_names(self) -> dict[nn.Parameter, str]:
        """Parameter to qualified name."""
        return self._runtime.param_names

    def iter_full(self, kind: str = "param", bucket_bytes: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every full parameter, gradient or optimizer state. Every rank must go through all of it.

        One collective per bucket; where everything is on every rank, none.

        Args:
            kind: ``param`` (in the compute dtype), ``fp32`` (master weights; frozen parameters cast), ``grad`` (reduced
                and unscaled; between the last backward and the update), or a state's name, such as ``exp_avg``.
            bucket_bytes: Most bytes gathered at once; a larger bucket is read in parts. None: a bucket at a time.

        Yields:
            ``(qualified name, tensor of the full shape)`` in model order; parameters without the quantity are left out.
            Of a parameter that is cut over model-parallel ranks it is the part that this rank's model has.
            The tensors of one bucket may share memory with each other, never with the model.
        """
        return iter_full(self._runtime, kind, bucket_bytes)

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

    def _subject(self) -> Subject:
        """What a checkpoint of this moment holds."""
        return Subject(
            model=self.module,
            runtime=self._runtime,
            optimizer=self._updater,
            lr_scheduler=self.lr_scheduler,
            dataloader=self.training_dataloader,
            counters={name: getattr(self, name) for name in COUNTERS},
            config=self.config,
            settings=self._root.checkpoint,
            precision=self._precision.name,
            stage=self._root.zero_optimization.stage,
            dp_world_size=self._parts.standing.zero_size,
            model_size=self._parts.standing.model_size,
            local_rank=self.local_rank,
            version=VERSION,
            use_fp32_weights=self._root.zero_optimization.load_from_fp32_weights,
        )

    def _resume_from(self, loaded: Loaded) -> None:
        """Goes on where the run that saved a checkpoint was; accumulation begins anew."""
        for name, value in loaded.counters.items():
            setattr(self, name, value)
        self._accumulates_from = self.micro_steps
        self._efficiency.at(self.global_steps)
        if self._updater is not None:
            self._updater.steps = self.global_steps
        self.loaded_checkpoint_dp_world_size = loaded.world_size
        self.loaded_checkpoint_mp_world_size = loaded.model_size

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's ``state_dict``; sharded parameters are empty tensors in it."""
        state = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters():
                if not parameter.requires_grad:
                    state.pop(prefix + name, None)
        return state

    # -- reports -----------------------------------------------------------------------------------------------------

    def memory_report(self) -> list[tuple[str, int, int, str]]:
        """Model-state bytes of this rank now: ``(kind, counted, by formula, formula)`` for each kind."""
        return memory_rows(self._runtime, self._updater, self._precision, self._accumulation_steps)

    def precision_report(self) -> list[dict[str, Any]]:
        """Dtypes per param group: ``compute``, ``accumulate``, ``reduce``, ``master`` and ``state``."""
        return precision_rows(self._runtime, self.basic_optimizer, self._precision, self._accumulation_steps)

    def _summary(self) -> str:
        layout = self._runtime.layout
        numel = sum(bucket.used_numel for bucket in layout.buckets)
        sharded = sum(bucket.layout.used_numel for bucket in self._runtime.buckets if bucket.is_sharded)
        shared_by = {bucket.world_size for bucket in layout.buckets if bucket.replicas > 1}
        groups = f" in groups of {shared_by.pop()}" if shared_by else ""
        return (
            f"ZeRO stage {self.zero_optimization_stage()} on {self.seq_dp_world_size} rank(s){groups}: "  # type: ignore[attr-defined]
            f"{numel:,} parameters in {len(layout.buckets)} buckets, {sharded:,} of them sharded between uses; batch "
            f"{self.train_batch_size()} = {self._batch.micro_batch_size} x {self._accumulation_steps} x "
            f"{self.dp_world_size} (micro-batch x accumulation x ranks)"
        )

    def collect_python_gc(self) -> None:
        """Runs Python's garbage collector now, for runs under ``disable_python_gc``."""
        gc.collect()

    def empty_partition_cache(self) -> None:
        """Frees every gathered parameter that is not in use."""
        self._runtime.drop_failed_backward()
        self._runtime.free_gathered()

    def destroy(self) -> None:
        """Takes all hooks from the model and frees buffers. May be called in any state, more than once.

        The model keeps what it holds: at stage 3 that is nothing of the parameters that are sharded (they are empty
        from then on), so save or gather them before.
        """
        empty = sum(bucket.layout.used_numel for bucket in self._runtime.buckets if bucket.is_sharded)
        if empty and not self._runtime.is_retired:
            log_dist_once(
                f"engine.destroy: {empty:,} parameters of the model were sharded and are empty from now on; what is to "
                "be used later must be saved before (save_checkpoint, save_16bit_model) or copied inside "
                "deepspeed.zero.GatheredParameters"
            )
        with ExitStack() as last_first:  # each of them, also after one that failed because another rank has died
            last_first.callback(self.monitor.close)
            last_first.callback(self._progress.close)
            last_first.callback(self._parts.homes.close)
            if self._updater is not None:
                last_first.callback(self._updater.destroy)
            last_first.callback(self._runtime.destroy)
            if not self._runtime.is_retired:
                last_first.callback(self._runtime.drop_open_work, together=False)
            last_first.callback(self._checkpoints.close)
            if self._stopped_gc:
                self._stopped_gc = False
                last_first.callback(gc.enable)
