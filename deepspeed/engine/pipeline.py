"""The engine of a pipeline: it has the whole step in its hands, and every rank calls it with the same words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from typing_extensions import override

from deepspeed.comm.watch import backward_comm
from deepspeed.data.repeating import RepeatingLoader
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.parts import EngineParts
from deepspeed.engine.roots import paired_roots
from deepspeed.errors import CommunicationError, DeepSpeedConfigError, DivergenceError, PipelineError
from deepspeed.parallel.pipe import losses
from deepspeed.parallel.pipe.data import DataError, DataFeed, agree_on_data, parts_of
from deepspeed.parallel.pipe.interpreter import Interpreter
from deepspeed.parallel.pipe.mean_outputs import mean_outputs
from deepspeed.parallel.pipe.module import PipelineModule
from deepspeed.parallel.pipe.schedule import inference_steps, training_steps
from deepspeed.parallel.pipe.schedule import instructions as told
from deepspeed.parallel.pipe.split import backward_to_inputs
from deepspeed.parallel.pipe.values import detached, shapes_of
from deepspeed.parallel.pipe.wires import connect_stages
from deepspeed.zero.micro_batch import MicroBatch, Part

_NOTHING = (None, None)  # an item of a stage that has no data


class PipelineEngine(Interpreter, DeepSpeedEngine):
    """Trains a :class:`~deepspeed.parallel.pipe.module.PipelineModule`. Made by ``deepspeed.initialize``.

    A step is one call, :meth:`train_batch`, which every rank makes; there is no forward, backward or step of its own.

    Attributes:
        grid: Where this rank stands.
        num_stages: Stages.
        stage_id: This rank's.
        micro_batches: Micro-batches of a step: the gradient accumulation steps.
        micro_batch_size: Samples of each.
        is_pipe_parallel: Whether there is more than one stage.
        is_data_parallel: Whether there is more than one copy of the model.
        is_model_parallel: Whether layers are cut over ranks.
        agg_train_loss: Mean loss of the last step over micro-batches and copies of the model.
        total_loss: Sum of the losses of the last step's micro-batches, divided by their number, on the last stage.
        loss: Of the last micro-batch, on the last stage.
        fwd_outputs: What the last evaluation gave for each micro-batch, on the last stage.
        has_attention_mask: Accepted; masks of any dtype cross between stages as they are.
        dynamic_shape: Accepted; shapes may always differ.
        first_output_send: Kept for programs that read it.
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
        wires = connect_stages(module.mesh, parts.device)
        wires.connect_pairs(module.stage_of_chunks)
        self.start_interpreter(wires, module.stage_of_chunks, parts.device)
        self._parameters_of = {chunk: frozenset(module.parameters_of(chunk)) for chunk in module.chunks}
        self._is_last_chunk_here = len(self._stage_of) - 1 in module.chunks
        self._pulls_data = 0 in module.chunks or self._is_last_chunk_here
        self._feed = DataFeed()
        self._loader: Iterable[Any] | None = None  # what the feed's items come from, again and again
        self._found = losses.MicroBatchLosses()
        self._mode, self._count = "", 0  # train, loss or outputs; micro-batches
        self._agreed: Callable[[], bool] | None = None
        self._failure = ""  # what ended a call, and with it the connections between the ranks
        self._has_run_first = False
        self.agg_train_loss: torch.Tensor | None = None
        self.total_loss: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self.fwd_outputs: list[Any] = []
        self._metrics: dict[str, float] = {}
        if self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)

    @property
    def pipeline(self) -> PipelineModule:
        """The module."""
        module = self._parts.model
        assert isinstance(module, PipelineModule)
        return module

    # -- what a pipeline does not do piece by piece ------------------------------------------------------------------

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raises: only whole steps are made."""
        raise PipelineError("engine.forward: one stage is not the model; call train_batch() or eval_batch()")

    def backward(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raises: only whole steps are made."""
        raise PipelineError("engine.backward: a pipeline makes whole steps; call train_batch()")

    def step(self, *_args: Any, **_kwargs: Any) -> None:
        """Raises: only whole steps are made."""
        raise PipelineError("engine.step: a pipeline makes whole steps; call train_batch()")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Raises: a step is one call, which reduces gradients once."""
        raise PipelineError("engine.no_sync: train_batch() accumulates over its micro-batches and reduces once")
        yield

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
        """Whether this rank has the first layers."""
        return self.stage_id == 0

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stage_id == self.num_stages - 1

    def get_pipeline_parallel_rank(self) -> int:
        """This rank's stage."""
        return self.stage_id

    def set_has_attention_mask(self, value: bool) -> None:
        """Notes the value; masks cross between stages like any tensors."""
        self.has_attention_mask = value

    def reset_activation_shape(self) -> None:
        """Does nothing: shapes travel whenever they change."""

    # -- data --------------------------------------------------------------------------------------------------------

    @property
    def data_iterator(self) -> Any:
        """Where this rank's items come from."""
        return self._feed.iterator

    @property
    def batch_fn(self) -> Any:
        """What is applied to every item."""
        return self._feed.batch_fn

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Takes items from a loader, again and again. Stages in the middle need none."""
        if self._pulls_data:
            self.training_dataloader = self._loader = loader
            self._feed.use(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterable[Any] | None) -> None:
        """Takes items from an iterator. Stages in the middle need none.

        A loader, which could be begun again, goes on where it was when it is given once more, and begins again at its
        end: programs hand it to every step. A list or tuple begins again each time.
        """
        if not self._pulls_data:
            return
        is_loader = iterator is not None and not isinstance(iterator, (Iterator, Sequence))
        if is_loader and iterator is self._loader:
            return
        self._loader = iterator if is_loader else None
        self._feed.use(RepeatingLoader(iterator) if is_loader else iterator)

    def set_batch_fn(self, fn: Any) -> None:
        """Applies ``fn`` to every item; where there is no iterator it is called with None."""
        self._feed.batch_fn = fn

    def deepspeed_io(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """A loader over this copy's share of ``dataset``, in its order: the stages must see the same samples."""
        kwargs.setdefault("route", "pipeline")
        return super().deepspeed_io(dataset, *args, **kwargs)

    # -- steps -------------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterable[Any] | None = None) -> torch.Tensor:
        """One step: ``micro_batches`` micro-batches through all stages, and the update. Every rank must call it.

        Args:
            data_iter: Gives pairs ``(inputs, labels)`` on the first and last stage, from now on; None: as before. See
                :meth:`set_dataiterator` for loaders and lists.

        Returns:
            Mean loss over micro-batches and copies of the model: 0-dim, fp32, on every rank.

        Raises:
            PipelineError: Data or micro-batches are missing, or a stage failed; on every rank, with the first cause.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch: called under torch.no_grad(); use eval_batch() for evaluation")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.pipeline.train()
        count = self.micro_batches
        self._get_ready("train_batch", count, "train", needs_labels=self.pipeline.loss_fn is not None)
        chosen = (self.pipeline.schedule, self.num_stages, count, self.pipeline.num_chunks)
        with self._telling_others("train_batch"):
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
        """Evaluates micro-batches, without gradients. Every rank must call it; training data stays where it is.

        Args:
            data_iter: Gives pairs ``(inputs, labels)`` on the first and last stage.
            return_logits: Return the outputs of the last micro-batch too, or of every one (``"all"``).
            compute_loss: Compute the loss; False: the outputs are the result.
            reduce_output: ``avg``: the mean over micro-batches and copies of the model, of losses as of outputs; None:
                a list with one entry for each micro-batch of this copy.
            bcast_loss: Tell every rank the loss; False: the last stage only.
            num_micro_batches: How many; None: as in training.

        Returns:
            The loss, 0-dim, or the list of losses; with ``return_logits`` ``(loss, outputs)``. Without
            ``compute_loss`` the outputs. Outputs are on the last stage, None elsewhere.

        Raises:
            NotImplementedError: Another reduction is asked for.
            PipelineError: As of :meth:`train_batch`.
        """
        if reduce_output not in ("avg", None):
            raise NotImplementedError(f"eval_batch(reduce_output={reduce_output!r}): expected 'avg' or None")
        count = num_micro_batches or self.micro_batches
        feed, self._feed = self._feed, DataFeed()
        self._feed.batch_fn = feed.batch_fn
        self._feed.use(data_iter if self._pulls_data else None)
        was_training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                needs_labels = compute_loss and self.pipeline.loss_fn is not None
                self._get_ready("eval_batch", count, "loss" if compute_loss else "outputs", needs_labels=needs_labels)
                with self._telling_others("eval_batch"):
                    self._exec_schedule(inference_steps(self._stage_of, count, self.stage_id))
                    result = self._evaluated(count, compute_loss, reduce_output, bcast_loss)
        finally:
            self._feed = feed
            self.module.train(was_training)
        if not return_logits:
            return result
        outputs = self.fwd_outputs if return_logits == "all" else self.fwd_outputs[-1:]
        logits = (outputs if return_logits == "all" else outputs[0]) if self._is_last_chunk_here else None
        return result, logits

    def _evaluated(self, count: int, compute_loss: bool, reduce_output: str | None, tell: bool) -> Any:
        here = self._is_last_chunk_here
        if not compute_loss:
            outputs = self.fwd_outputs if here else None
            if reduce_output is None:
                return outputs
            return mean_outputs(self._parts.groups.job, self.grid.mesh, self.global_rank, outputs)
        each, mean = [float(loss) for loss in self._found.losses], self._found.mean
        if tell or reduce_output == "avg":
            job = self._parts.groups.job
            each, average, self._metrics = losses.share_losses(
                job, self.grid.mesh, self.global_rank, self._found if here else None, count
            )
            mean = torch.tensor(average)
        if not tell and not here:
            return None
        if reduce_output is None:
            return [torch.tensor(loss, device=self.device) for loss in each]
        return mean.to(self.device)

    def _get_ready(self, call: str, count: int, mode: str, *, needs_labels: bool) -> None:
        """Everything that may fail before anything is computed."""
        if self._failure:
            raise PipelineError(
                f"{call}: an earlier call failed, and the ranks are no longer connected. {self._failure}. Start the "
                "job again, from its last checkpoint"
            )
        self._mode, self._count = mode, count
        self.pipeline.failed_at = ""
        self._found, self.fwd_outputs = losses.MicroBatchLosses(), []
        feed = self._feed if self._pulls_data else None
        with self._telling_others(call):
            self._standing.at = "pulling data"
            self._agreed = agree_on_data(
                self._parts.groups.job, self.grid.mesh, self.global_rank, feed, count, call, needs_labels=needs_labels
            )

    @override
    def own_items(self) -> list[Any]:
        if self._agreed is None:  # the program runs a schedule of its own
            self._get_ready(
                "_exec_schedule", self.micro_batches, "train", needs_labels=self.pipeline.loss_fn is not None
            )
        self._standing.at = "pulling data"
        if not self._pulls_data:
            return []
        return list(map(parts_of, self._feed.ready(self._count))) if self._feed.has_any else [_NOTHING] * self._count

    @override
    def agree(self) -> bool:
        assert self._agreed is not None
        agreed, self._agreed = self._agreed, None
        self._standing.at = "pulling data"
        labels_travel = agreed()
        self._feed.use_up(self._count)
        return labels_travel

    def may_begin(self) -> bool:
        """See the class this one derives from; where stages have several ranks, these talk in their forwards."""
        return self.num_stages == self.world_size and self._feed.has_any and len(self._items) == self._count

    @contextmanager
    def _telling_others(self, call: str) -> Iterator[None]:
        """An exception ends the step on every rank, with the same words; what connects the ranks ends with it."""
        try:
            yield
        except (CommunicationError, DivergenceError) as error:
            was_told = str(error).startswith(f"{call}: ")
            said = str(error) if was_told else f"{self._place(call)}: {error}"
            self._failure = said
            raise PipelineError(said) from (None if was_told else error)
        except DataError:
            raise
        except Exception as error:
            what = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
            said = f"{self._place(call)}: {what}"
            watch = self._parts.groups.job.watch
            if watch is not None:  # there are others
                self._failure = said
                watch.tell_failure(said)
            raise PipelineError(said) from error

    def _place(self, call: str) -> str:
        at = self._standing.at
        parts = [at.describe() if isinstance(at, told.PipeInstruction) else at, self.pipeline.failed_at]
        return ", ".join([f"{call}: stage {self.stage_id} (rank {self.global_rank})", *filter(None, parts)])

    # -- computations ------------------------------------------------------------------------------------------------

    @override
    def compute_forward(self, chunk: int, micro_batch: int, inputs: Any, labels: Any) -> Any:
        pipeline = self.pipeline
        pipeline.active_chunk = chunk
        try:
            outputs = DeepSpeedEngine.forward(self, inputs)
        finally:
            pipeline.active_chunk = None
        if chunk != len(self._stage_of) - 1:
            return outputs
        if self._mode != "train":
            self.fwd_outputs.append(detached(outputs))
        if self._mode == "outputs":
            return outputs
        loss, metrics = losses.split_loss(self._loss_of(outputs, labels), has_loss_fn=pipeline.loss_fn is not None)
        self._found.add(loss, {**(metrics or {}), **(pipeline.get_additional_losses() or {})})
        self.loss = loss.detach()
        return loss

    def _check_rows(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Compares the inputs of the first chunk only: the others take activations, of any shape."""
        if self.pipeline.active_chunk == 0:
            super()._check_rows(inputs, named)

    def _loss_of(self, outputs: Any, labels: Any) -> Any:
        """Returns what ``loss_fn`` makes of a micro-batch; without it, the outputs."""
        pipeline = self.pipeline
        if pipeline.loss_fn is None:
            return outputs
        try:
            return pipeline.loss_fn(outputs, labels)
        except Exception:
            name = getattr(pipeline.loss_fn, "__name__", type(pipeline.loss_fn).__name__)
            pipeline.failed_at = f"loss_fn {name}, outputs {shapes_of(outputs)}, labels {shapes_of(labels)}"
            raise

    def _let_announce(self, outputs: Any) -> None:
        """There is no backward but those of the schedule."""

    def compute_backward(
        self,
        chunk: int,
        micro_batch: int,
        outputs: list[torch.Tensor],
        gradients: list[Any] | None,
        *,
        closes: bool = True,
    ) -> None:
        """See the class this one derives from; ``closes`` as of :meth:`_said`."""
        said = self._said(chunk, micro_batch, closes=closes)
        self._check_loss(outputs, gradients, micro_batch)
        if not outputs:
            return  # nothing of this stage is trained, nor of those before it
        if gradients is None:
            DeepSpeedEngine.backward(self, outputs[0], micro_batch=said)
        elif any(gradient is not None for gradient in gradients):
            DeepSpeedEngine.backward(self, outputs, gradients=gradients, micro_batch=said)

    @override
    def compute_input_gradients(
        self,
        chunk: int,
        micro_batch: int,
        outputs: list[torch.Tensor],
        gradients: list[Any] | None,
        inputs: list[torch.Tensor],
    ) -> Any:
        self._check_loss(outputs, gradients, micro_batch)
        if not outputs or not inputs:
            return outputs, gradients  # nobody waits: all of it is the weights' half
        # Experts have exchanges in their backward, which must come once and on all ranks alike, whoever has tokens.
        if self.pipeline.activation_checkpoint_interval > 0 or backward_comm.is_uneven():
            self.compute_backward(chunk, micro_batch, outputs, gradients, closes=False)
            return None
        if gradients is None:
            loss = outputs[0] / self.gradient_accumulation_steps()
            self._progress.loss(loss)
            roots = [self._scaling.apply(loss)]
            given = [torch.ones_like(roots[0])]
        elif any(gradient is not None for gradient in gradients):
            roots, given = paired_roots(outputs, gradients)
        else:
            return None
        self._begin_by_hand(self._said(chunk, micro_batch, closes=False))
        return self._run_backward(lambda: backward_to_inputs(roots, given, inputs))

    def _check_loss(self, outputs: list[torch.Tensor], gradients: list[Any] | None, micro_batch: int) -> None:
        if gradients is None and not outputs and any(p.requires_grad for p in self.module.parameters()):
            raise PipelineError(
                f"the loss of micro-batch {micro_batch} needs no gradient, though weights before it are trained; let "
                "loss_fn compute it from the outputs without detach() or no_grad()"
            )

    @override
    def compute_weight_gradients(self, chunk: int, micro_batch: int, work: Any) -> None:
        if isinstance(work, tuple):
            self.compute_backward(chunk, micro_batch, *work)
            return
        self._begin_by_hand(self._said(chunk, micro_batch))
        self._run_backward(lambda: None if work is None else work.run())

    def _begin_by_hand(self, micro_batch: MicroBatch) -> None:
        self._runtime.leave_backward("train_batch")
        self._runtime.drop_open_work()
        self._batches.say(micro_batch)

    def _said(self, chunk: int, micro_batch: int, *, closes: bool = True) -> MicroBatch:
        """Where a backward stands in the update; ``closes``: its weights' gradients are computed in it, not later."""
        reaches = self._parameters_of[chunk]
        closed: frozenset[torch.nn.Parameter] = frozenset()
        if closes and self._remaining[chunk] <= 0:
            later = (self._parameters_of[other] for other, left in self._remaining.items() if left > 0)
            closed = reaches.difference(*later)
        is_first, self._has_run_first = not self._has_run_first, True
        each = self._parts.placement.shard_params and closes
        part = Part(reaches, closes=closed, reduces_each=each)
        return MicroBatch(micro_batch, is_first=is_first, is_last=not any(self._remaining.values()), part=part)

    def _exec_reduce_tied_grads(self) -> None:
        """Part of the update: tied weights wait for it, as their stages do not finish together."""

    def _exec_reduce_grads(self) -> None:
        """Done in the backward that fills a bucket for the last time."""

    def _exec_optimizer_step(self) -> None:
        count = self.micro_batches
        self._standing.at = "updating the weights"
        self._has_run_first = False
        self._batches.say(MicroBatch(count - 1, is_first=False, is_last=True))
        self._batches.has_run_backward = True
        self._batches.micro_steps += count - 1
        DeepSpeedEngine.step(self)

    def _update(self, lr_kwargs: dict[str, Any] | None) -> None:
        """The losses travel with the numbers that the ranks tell each other for the update."""
        assert self._updater is not None
        found = self._found if self._is_last_chunk_here else None
        if found is not None:
            self.total_loss = found.mean
        self._extra = losses.row_of(found, self.micro_batches)
        super()._update(lr_kwargs)
        assert self._updater.last_report is not None
        _, mean, self._metrics = losses.read_rows(
            self._parts.groups.job, self.grid.mesh, self.global_rank, self._updater.last_report.extra, found
        )
        self.agg_train_loss = torch.tensor(mean, device=self.device)
        if found is None:
            self._progress.loss(self.agg_train_loss)

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Means of what the module's ``get_additional_losses`` gave in the last step, on every rank; None without."""
        return {name: torch.tensor(value, device=self.device) for name, value in self._metrics.items()} or None

    @property
    def metrics(self) -> dict[str, float]:
        """Means of what the loss function gave beside the loss in the last step, on every rank."""
        return dict(self._metrics)

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        told.OptimizerStep: _exec_optimizer_step,
        told.ReduceGrads: _exec_reduce_grads,
        told.ReduceTiedGrads: _exec_reduce_tied_grads,
        told.LoadMicroBatch: Interpreter._exec_load_micro_batch,
        told.ForwardPass: Interpreter._exec_forward_pass,
        told.BackwardPass: Interpreter._exec_backward_pass,
        told.BackwardInput: Interpreter._exec_backward_input,
        told.BackwardWeight: Interpreter._exec_backward_weight,
        told.SendActivation: Interpreter._exec_send_activations,
        told.RecvActivation: Interpreter._exec_recv_activations,
        told.SendGrad: Interpreter._exec_send_grads,
        told.RecvGrad: Interpreter._exec_recv_grads,
    }


class DualPipeVEngine(PipelineEngine):
    """The engine of a :class:`~deepspeed.parallel.pipe.dualpipev.DualPipeVModule`."""
