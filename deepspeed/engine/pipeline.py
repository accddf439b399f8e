"""The engine of a pipeline: ``train_batch`` makes a whole step; every rank must call it with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, ClassVar

import torch
from typing_extensions import override

from deepspeed.data.loader import RepeatingLoader
from deepspeed.engine.engine import DeepSpeedEngine, EngineBase
from deepspeed.engine.forwarding import forwarded, forwarded_attribute
from deepspeed.engine.inspection import EngineInspection
from deepspeed.engine.loss_counter import PipelineLossCounter
from deepspeed.engine.parts import EngineParts
from deepspeed.engine.stage_compute import PipelineCompute, StageFailures
from deepspeed.errors import DeepSpeedConfigError, PipelineError
from deepspeed.parallel.pipe.channel import StageChannels, connect_stages
from deepspeed.parallel.pipe.data import DataFeed
from deepspeed.parallel.pipe.interpreter import METHOD_OF_INSTRUCTION, Interpreter
from deepspeed.parallel.pipe.module import PipelineModule
from deepspeed.parallel.pipe.schedule import inference_steps, training_steps
from deepspeed.parallel.pipe.schedule.lists import PipeInstruction


def _not_by_itself(sentence: str) -> Callable[..., Any]:
    """Returns a method that raises PipelineError with ``sentence``, for a method that only other engines support."""

    def refuse(self: PipelineEngine, *_args: Any, **_kwargs: Any) -> Any:
        """Raises PipelineError: a pipeline makes whole steps."""
        raise PipelineError(sentence)

    return refuse


_EXECUTE: dict[type, Callable[..., None]] = {
    kind: forwarded("_interpreter", getattr(Interpreter, name)) for kind, name in METHOD_OF_INSTRUCTION.items()
}
"""The engine's method that executes each instruction."""


class PipelineEngine(EngineBase):
    """Trains a :class:`~deepspeed.parallel.pipe.module.PipelineModule`. Made by ``deepspeed.initialize``.

    A step is one call, :meth:`train_batch`, which every rank makes; there is no forward, backward or step of its own.

    Attributes:
        grid: The coordinates of this rank.
        num_stages: Stages.
        stage_id: This rank's.
        micro_batches: Micro-batches of a step: the gradient accumulation steps.
        micro_batch_size: Samples of each.
        is_pipe_parallel: Whether there is more than one stage.
        is_data_parallel: Whether there is more than one copy of the model.
        is_model_parallel: Whether layers are cut over ranks.
        has_attention_mask: Accepted; masks of any dtype cross between stages as they are.
        dynamic_shape: Accepted; shapes may always differ.
        first_output_send: Kept for programs that read it.

    Raises:
        DeepSpeedConfigError: An mpu is given, although the module has laid out the ranks.
    """

    def __init__(self, parts: EngineParts) -> None:
        module = parts.model
        assert isinstance(module, PipelineModule)
        if parts.client.mpu is not None and parts.client.mpu is not module.mpu():
            raise DeepSpeedConfigError(
                "initialize(mpu=...): a PipelineModule has laid the ranks out already (PipelineModule(topology=...)); "
                "leave mpu out"
            )
        super().__init__(parts)
        self.grid = module.mpu()
        self.mpu = self.grid
        self.num_stages, self.stage_id = module.num_stages, module.stage_id
        self.is_pipe_parallel = self.num_stages > 1
        self.is_data_parallel = self.grid.data_parallel_size > 1
        self.is_model_parallel = self.grid.model_parallel_size > 1
        self.has_attention_mask = self.has_bool_tensors = False
        self.dynamic_shape = module.dynamic_shape
        job = parts.groups.job
        self._failures = StageFailures(job, self._place)
        self._compute = PipelineCompute(
            module,
            self._train_step,
            self._batches,
            self._progress,
            job=parts.setup.job,
            everybody=job,
            rank=parts.global_rank,
            device=parts.device,
            failures=self._failures,
            reduces_each=parts.placement.shard_params,
            splits_backward=self._hooks.gathers_alike or not parts.placement.shard_params,
            after_update=self._end_step,
        )
        channels = connect_stages(parts.setup.job, module.mesh, parts.device)
        channels.connect_pairs(module.stage_of_chunks)
        self.start_interpreter(channels, module.stage_of_chunks, parts.device)
        self._loader: Iterable[Any] | None = None  # source of the feed's items, restarted at its end
        if self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)

    @override
    def _make_loss_counter(self) -> PipelineLossCounter:
        return PipelineLossCounter(self._runtime, self.pipeline.num_stages)

    @property
    def pipeline(self) -> PipelineModule:
        """The module."""
        module = self._parts.model
        assert isinstance(module, PipelineModule)
        return module

    def start_interpreter(self, wires: StageChannels, stage_of: tuple[int, ...], device: torch.device) -> None:
        """Makes the interpreter of this stage's instructions."""
        self._interpreter = Interpreter(wires, stage_of, device, self._compute)

    def inspect(self) -> EngineInspection:
        """Returns the parts whose memory and traffic the planner counts."""
        return replace(super().inspect(), interpreter=self._interpreter)

    # -- names of other engines --------------------------------------------------------------------------------------

    forward = _not_by_itself("engine.forward: one stage is not the model; call train_batch() or eval_batch()")
    backward = _not_by_itself("engine.backward: a pipeline makes whole steps; call train_batch()")
    step = _not_by_itself("engine.step: a pipeline makes whole steps; call train_batch()")
    no_sync = _not_by_itself("engine.no_sync: train_batch() accumulates over its micro-batches and reduces once")
    coalesce_grad_reduction = _not_by_itself(
        "engine.coalesce_grad_reduction: train_batch() accumulates over its micro-batches and reduces once"
    )

    # -- results -----------------------------------------------------------------------------------------------------

    agg_train_loss = forwarded_attribute("_compute", "agg_train_loss", "Mean loss of the last step, on every rank.")
    total_loss = forwarded_attribute("_compute", "total_loss", "Mean loss of this copy of the model.")
    loss = forwarded_attribute("_compute", "loss", "Loss of the last micro-batch, on the last stage.")
    pipe_buffers = forwarded_attribute("_interpreter", "pipe_buffers", "Values of the stage's buffers, by kind.")
    fwd_outputs = forwarded_attribute("_compute", "fwd_outputs", "Outputs of the last evaluation, on the last stage.")

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Returns the means of the module's ``get_additional_losses`` over the last step, on every rank.

        None without.
        """
        return {name: torch.tensor(value, device=self.device) for name, value in self.metrics.items()} or None

    @property
    def metrics(self) -> dict[str, float]:
        """Means of what the loss function gave beside the loss in the last step, on every rank."""
        return dict(self._compute.metrics)

    # -- sizes and places --------------------------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self.train_micro_batch_size_per_gpu()

    def is_first_stage(self) -> bool:
        """Returns whether this rank has the first layers."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Returns whether this rank has the last stage."""
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        """Returns this rank's stage."""
        return self.stage_id

    def set_has_attention_mask(self, value: bool) -> None:
        """Records the value; masks cross between stages like any tensors."""
        self.has_attention_mask = value

    def reset_activation_shape(self) -> None:
        """Does nothing: shapes are sent whenever they change."""

    # -- data --------------------------------------------------------------------------------------------------------

    @property
    def data_iterator(self) -> Any:
        """The iterator of this rank's items."""
        return self._compute.feed.iterator

    @property
    def batch_fn(self) -> Any:
        """The function that is applied to every item."""
        return self._compute.feed.batch_fn

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Takes items from a loader, restarted at its end. Stages in the middle need none."""
        if self._compute.pulls_data:
            self.training_dataloader = self._loader = loader
            self._compute.feed.use(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterable[Any] | None) -> None:
        """Takes items from an iterator. Stages in the middle need none.

        Programs pass the same loader to every step: it continues where it was, and restarts at its end. A list or tuple
        starts from its first item each time.
        """
        if not self._compute.pulls_data:
            return
        is_loader = iterator is not None and not isinstance(iterator, (Iterator, Sequence))
        if is_loader and iterator is self._loader:
            return
        self._loader = iterator if is_loader else None
        self._compute.feed.use(RepeatingLoader(iterator) if is_loader else iterator)

    def set_batch_fn(self, fn: Any) -> None:
        """Applies ``fn`` to every item; where there is no iterator it is called with None."""
        self._compute.feed.batch_fn = fn

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a loader over this copy's share of ``dataset``, in order: the stages must see the same samples."""
        kwargs.setdefault("route", "pipeline")
        return super().deepspeed_io(dataset, *args, **kwargs)

    # -- steps -------------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterable[Any] | None = None) -> torch.Tensor:
        """Runs one step: ``micro_batches`` micro-batches through all stages, and the update. Every rank must call it.

        Args:
            data_iter: Gives pairs ``(inputs, labels)`` on the first and last stage, from now on; None: as before. See
                :meth:`set_dataiterator` for loaders and lists.

        Returns:
            Mean loss over micro-batches and copies of the model: 0-dim, fp32, on every rank.

        Raises:
            PipelineError: Data or micro-batches are missing, or a stage failed; on every rank, with the first cause.
            RuntimeError: It is called under ``torch.no_grad()``.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch: called under torch.no_grad(); use eval_batch() for evaluation")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.pipeline.train()
        count = self.micro_batches
        self._get_ready("train_batch", count, "train")
        chosen = (self.pipeline.schedule, self.num_stages, count, self.pipeline.num_chunks)
        with self._failures.shared("train_batch"), self._progress.schedule():
            self._exec_schedule(training_steps(*chosen, self.stage_id))
        assert self.agg_train_loss is not None
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterable[Any] | None,
        return_logits: bool | str = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluates micro-batches, without gradients. Every rank must call it; no training data is consumed.

        Args:
            data_iter: Gives pairs ``(inputs, labels)`` on the first and last stage.
            return_logits: Return the outputs of the last micro-batch too, or of every one (``"all"``).
            compute_loss: Compute the loss; False: the outputs are the result.
            reduce_output: ``avg``: the mean over micro-batches and copies of the model, of losses as of outputs; None:
                a list with one entry for each micro-batch of this copy.
            bcast_loss: Send the loss to every rank; False: the last stage only.
            num_micro_batches: How many; None: as in training.

        Returns:
            The loss, 0-dim, or the list of losses; with ``return_logits`` ``(loss, outputs)``. Without
            ``compute_loss`` the outputs. Outputs are on the last stage, None elsewhere.

        Raises:
            NotImplementedError: Another reduction is requested.
            PipelineError: A stage failed, on every rank: see :meth:`train_batch`.
        """
        if reduce_output not in ("avg", None):
            raise NotImplementedError(f"eval_batch(reduce_output={reduce_output!r}): expected 'avg' or None")
        count = num_micro_batches or self.micro_batches
        compute, training_feed = self._compute, self._compute.feed
        compute.feed = DataFeed()
        compute.feed.batch_fn = training_feed.batch_fn
        compute.feed.use(data_iter if compute.pulls_data else None)
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                self._get_ready("eval_batch", count, "loss" if compute_loss else "outputs")
                with self._failures.shared("eval_batch"):
                    self._exec_schedule(inference_steps(self._interpreter.stage_of, count, self.stage_id))
                    result = compute.evaluated(reduce_output, shares_loss=bcast_loss)
        finally:
            compute.feed = training_feed
            self.module.train(was_training)
        if not return_logits:
            return result
        outputs = self.fwd_outputs if return_logits == "all" else self.fwd_outputs[-1:]
        logits = (outputs if return_logits == "all" else outputs[0]) if compute.is_last else None
        return result, logits

    @override
    def _end_step(self, lr_arguments: Mapping[str, Any] | None = None) -> None:
        # A trace may end here. At the end of a send that began in it, torch's profiler would write to freed memory.
        self._interpreter.drain()
        super()._end_step(lr_arguments)

    def _get_ready(self, call: str, count: int, mode: str) -> None:
        self._interpreter.at = "pulling data"
        self._compute.get_ready(call, count, mode)

    def _place(self, call: str) -> str:
        at = self._interpreter.at
        parts = [at.describe() if isinstance(at, PipeInstruction) else at, self.pipeline.failed_at]
        return ", ".join([f"{call}: stage {self.stage_id} (rank {self.global_rank})", *filter(None, parts)])

    # -- the program's own schedules ---------------------------------------------------------------------------------

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = dict(_EXECUTE)

    def _exec_schedule(self, pipe_schedule: Iterable[list[PipeInstruction]]) -> None:
        """Runs one step; instructions that a program has put into ``_INSTRUCTION_MAP`` are called with the engine."""
        own = {
            kind: MethodType(execute, self)
            for kind, execute in self._INSTRUCTION_MAP.items()
            if execute is not _EXECUTE.get(kind)
        }
        self._interpreter.run(pipe_schedule, own)

    # What instructions compute, under the method names of version 1.0.
    own_items = forwarded("_compute", PipelineCompute.own_items)
    agree = forwarded("_compute", PipelineCompute.agree)
    may_begin = forwarded("_compute", PipelineCompute.may_begin)
    compute_forward = forwarded("_compute", PipelineCompute.compute_forward)
    compute_backward = forwarded("_compute", PipelineCompute.compute_backward)
    compute_input_gradients = forwarded("_compute", PipelineCompute.compute_input_gradients)
    compute_weight_gradients = forwarded("_compute", PipelineCompute.compute_weight_gradients)


for _execute in _EXECUTE.values():
    setattr(PipelineEngine, _execute.__name__, _execute)

DeepSpeedEngine.register(PipelineEngine)  # programs test isinstance(engine, DeepSpeedEngine)

DualPipeVEngine = PipelineEngine
"""The engine of a :class:`~deepspeed.parallel.pipe.module.DualPipeVModule`: that of any pipeline."""
