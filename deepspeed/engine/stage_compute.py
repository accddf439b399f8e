"""What the instructions of a pipeline stage compute: its chunks by the engine's training step, and the losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.comm.transports.transport import Transport
from deepspeed.comm.watch import backward_comm
from deepspeed.engine.batches import Batches
from deepspeed.engine.progress import ProgressLog
from deepspeed.engine.roots import paired_roots
from deepspeed.engine.stage_failures import StageFailures
from deepspeed.engine.train_step import TrainStep
from deepspeed.errors import PipelineError
from deepspeed.parallel.pipe import losses
from deepspeed.parallel.pipe.data import DataFeed, agree_on_data, parts_of
from deepspeed.parallel.pipe.mean_outputs import mean_outputs
from deepspeed.parallel.pipe.module import PipelineModule
from deepspeed.parallel.pipe.split import backward_to_inputs
from deepspeed.parallel.pipe.values import detached, shapes_of
from deepspeed.zero.micro_batch import MicroBatch, Part

_NO_ITEM = (None, None)  # an item of a stage that has no data


class PipelineCompute:
    """Computes the chunks of one pipeline stage. Implements ``StageCompute`` for the interpreter.

    Args:
        module: The pipeline.
        step: The engine's training step.
        batches: Sizes of batches.
        progress: Takes losses.
        job: All ranks.
        rank: This one.
        device: Where losses lie.
        failures: Reports failures to the other ranks.
        reduces_each: Gradients are reduced in each backward (they are sharded).
        after_update: Called at the end of each update.

    Attributes:
        backwards_left: See ``StageCompute``.
        feed: Where this rank's items come from.
        is_last: Whether the last chunk of the model is on this stage.
        pulls_data: Whether this stage needs items: it has the first or the last chunk.
        agg_train_loss: Mean loss of the last step over micro-batches and copies of the model: 0-dim, fp32.
        total_loss: Mean loss of the last step over micro-batches, on the last stage.
        loss: Of the last micro-batch, on the last stage.
        fwd_outputs: What the last evaluation computed for each micro-batch, on the last stage.
        metrics: Means over micro-batches and copies of what the loss function returned beside the loss.
    """

    def __init__(
        self,
        module: PipelineModule,
        step: TrainStep,
        batches: Batches,
        progress: ProgressLog,
        *,
        job: Transport,
        rank: int,
        device: torch.device,
        failures: StageFailures,
        reduces_each: bool,
        after_update: Callable[[], None],
    ) -> None:
        self.backwards_left: Counter[int] = Counter()
        self.feed = DataFeed()
        self.is_last = len(module.stage_of_chunks) - 1 in module.chunks
        self.pulls_data = 0 in module.chunks or self.is_last
        self.agg_train_loss: torch.Tensor | None = None
        self.total_loss: torch.Tensor | None = None
        self.loss: torch.Tensor | None = None
        self.fwd_outputs: list[Any] = []
        self.metrics: dict[str, float] = {}
        self._module, self._step, self._batches, self._progress = module, step, batches, progress
        self._job, self._mesh, self._rank, self._device = job, module.mesh, rank, device
        self._failures = failures
        self._reduces_each = reduces_each
        self._after_update = after_update
        self._parameters_of = {chunk: frozenset(module.parameters_of(chunk)) for chunk in module.chunks}
        self._last_chunk = len(module.stage_of_chunks) - 1
        self._found = losses.MicroBatchLosses()
        self._mode, self._count = "", 0  # train, loss or outputs; micro-batches
        self._agreed: Callable[[], bool] | None = None
        self._has_all_items = False
        self._has_run_first = False

    # -- data --------------------------------------------------------------------------------------------------------

    def get_ready(self, call: str, count: int, mode: str) -> None:
        """Pulls the items of a step and starts their comparison with the other ranks' items.

        Args:
            call: What the program called: train_batch, eval_batch or _exec_schedule.
            count: Micro-batches.
            mode: What is computed: ``train``, ``loss`` or ``outputs``.

        Raises:
            PipelineError: An earlier call failed.
        """
        self._failures.refuse_after_failure(call)
        self._mode, self._count = mode, count
        self._module.failed_at = ""
        self._found, self.fwd_outputs = losses.MicroBatchLosses(), []
        feed = self.feed if self.pulls_data else None
        needs_labels = mode != "outputs" and self._module.loss_fn is not None
        with self._failures.shared(call):
            self._agreed = agree_on_data(
                self._job, self._mesh, self._rank, feed, count, call, needs_labels=needs_labels
            )

    def own_items(self) -> list[Any]:
        """Returns this rank's pairs ``(inputs, labels)`` of the step, as far as it has them."""
        if self._agreed is None:  # the program runs a schedule of its own
            self.get_ready("_exec_schedule", self._batches.gradient_accumulation_steps(), "train")
        items: list[Any] = []
        if self.pulls_data:
            has_any = self.feed.has_any
            items = list(map(parts_of, self.feed.ready(self._count))) if has_any else [_NO_ITEM] * self._count
        self._has_all_items = self.feed.has_any and len(items) == self._count
        return items

    def may_begin(self) -> bool:
        """See ``StageCompute``; where stages have several ranks, their forwards communicate."""
        return self._module.num_stages == self._mesh.world_size and self._has_all_items

    def agree(self) -> bool:
        """Waits until all ranks are known to have their items; returns whether labels travel from the first stage."""
        assert self._agreed is not None
        agreed, self._agreed = self._agreed, None
        labels_travel = agreed()
        self.feed.use_up(self._count)
        return labels_travel

    # -- computations ------------------------------------------------------------------------------------------------

    def compute_forward(self, chunk: int, micro_batch: int, inputs: Any, labels: Any) -> Any:
        """Runs a chunk and returns its outputs; of the last chunk in training, the loss."""
        module = self._module
        module.active_chunk = chunk
        try:
            # Only the first chunk takes the program's data. No backward runs but those of the schedule.
            outputs = self._step.forward(
                module, (inputs,), {}, is_training=module.training, has_data=chunk == 0, announces=False
            )
        finally:
            module.active_chunk = None
        if chunk != self._last_chunk:
            return outputs
        if self._mode != "train":
            self.fwd_outputs.append(detached(outputs))
        if self._mode == "outputs":
            return outputs
        loss, metrics = losses.split_loss(self._loss_of(outputs, labels), has_loss_fn=module.loss_fn is not None)
        self._found.add(loss, {**(metrics or {}), **(module.get_additional_losses() or {})})
        self.loss = loss.detach()
        return loss

    def _loss_of(self, outputs: Any, labels: Any) -> Any:
        """Returns what ``loss_fn`` makes of a micro-batch; without it, the outputs."""
        module = self._module
        if module.loss_fn is None:
            return outputs
        try:
            return module.loss_fn(outputs, labels)
        except Exception:
            name = getattr(module.loss_fn, "__name__", type(module.loss_fn).__name__)
            module.failed_at = f"loss_fn {name}, outputs {shapes_of(outputs)}, labels {shapes_of(labels)}"
            raise

    def compute_backward(
        self,
        chunk: int,
        micro_batch: int,
        outputs: list[torch.Tensor],
        gradients: list[Any] | None,
        *,
        closes: bool = True,
    ) -> None:
        """See ``StageCompute``; ``closes``: no weight gradients are computed later."""
        current = self._micro_batch(chunk, micro_batch, closes=closes)
        self._check_loss(outputs, gradients, micro_batch)
        if not outputs:
            return  # nothing of this stage is trained, nor of those before it
        if gradients is None:
            self._step.backward_of_loss(outputs[0], current)
        elif any(gradient is not None for gradient in gradients):
            self._step.backward(outputs, gradients, current)

    def compute_input_gradients(
        self,
        chunk: int,
        micro_batch: int,
        outputs: list[torch.Tensor],
        gradients: list[Any] | None,
        inputs: list[torch.Tensor],
    ) -> Any:
        """Computes the gradients of a chunk's ``inputs``; returns what the gradients of its weights need."""
        self._check_loss(outputs, gradients, micro_batch)
        if not outputs or not inputs:
            return outputs, gradients  # no stage waits: all of it is the weights' half
        # Experts have exchanges in their backward, which must come once and on all ranks alike, with or without tokens.
        if self._module.activation_checkpoint_interval > 0 or backward_comm.is_uneven():
            self.compute_backward(chunk, micro_batch, outputs, gradients, closes=False)
            return None
        if gradients is None:
            roots = [self._step.loss_and_root(outputs[0])[1]]
            given = [torch.ones_like(roots[0])]
        elif any(gradient is not None for gradient in gradients):
            roots, given = paired_roots(outputs, gradients)
        else:
            return None
        current = self._micro_batch(chunk, micro_batch, closes=False)
        return self._step.run_backward(lambda: backward_to_inputs(roots, given, inputs), current)

    def compute_weight_gradients(self, chunk: int, micro_batch: int, work: Any) -> None:
        """Computes the gradients of a chunk's weights from what :meth:`compute_input_gradients` returned."""
        if isinstance(work, tuple):
            self.compute_backward(chunk, micro_batch, *work)
            return
        current = self._micro_batch(chunk, micro_batch)
        self._step.run_backward(lambda: None if work is None else work.run(), current)

    def _check_loss(self, outputs: list[torch.Tensor], gradients: list[Any] | None, micro_batch: int) -> None:
        if gradients is None and not outputs and any(p.requires_grad for p in self._module.parameters()):
            raise PipelineError(
                f"the loss of micro-batch {micro_batch} needs no gradient, though weights before it are trained; let "
                "loss_fn compute it from the outputs without detach() or no_grad()"
            )

    def _micro_batch(self, chunk: int, micro_batch: int, *, closes: bool = True) -> MicroBatch:
        """Returns the micro-batch of a backward; ``closes``: no weight gradients are computed later."""
        reaches = self._parameters_of[chunk]
        closed: frozenset[nn.Parameter] = frozenset()
        if closes and self.backwards_left[chunk] <= 0:
            later = (self._parameters_of[other] for other, left in self.backwards_left.items() if left > 0)
            closed = reaches.difference(*later)
        is_first, self._has_run_first = not self._has_run_first, True
        part = Part(reaches, closes=closed, reduces_each=self._reduces_each and closes)
        return MicroBatch(micro_batch, is_first=is_first, is_last=not any(self.backwards_left.values()), part=part)

    # -- results -----------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Updates the weights. The losses travel in the update's exchange. Every rank must call it."""
        count = self._batches.gradient_accumulation_steps()
        self._has_run_first = False
        found = self._found if self.is_last else None
        if found is not None:
            self.total_loss = found.mean
        report = self._step.update(extra=losses.row_of(found, count), micro_batches=count)
        assert report is not None, "a schedule ends in an update"
        _, mean, self.metrics = losses.read_rows(self._job, self._mesh, self._rank, report.extra, found)
        self.agg_train_loss = torch.tensor(mean, device=self._device)
        if found is None:
            self._progress.loss(self.agg_train_loss)
        self._after_update()

    def evaluated(self, reduce_output: str | None, *, shares_loss: bool) -> Any:
        """Returns the result of an evaluation that has run. Every rank must call it.

        Args:
            reduce_output: ``avg``: the mean over micro-batches and copies of the model; None: a list, one entry for
                each micro-batch of this copy.
            shares_loss: Give the loss to every rank, not to the last stage only.
        """
        if self._mode == "outputs":
            outputs = self.fwd_outputs if self.is_last else None
            if reduce_output is None:
                return outputs
            return mean_outputs(self._job, self._mesh, self._rank, outputs)
        each, mean = [float(loss) for loss in self._found.losses], self._found.mean
        if shares_loss or reduce_output == "avg":
            found = self._found if self.is_last else None
            each, average, self.metrics = losses.share_losses(self._job, self._mesh, self._rank, found, self._count)
            mean = torch.tensor(average)
        if not shares_loss and not self.is_last:
            return None
        if reduce_output is None:
            return [torch.tensor(loss, device=self._device) for loss in each]
        return mean.to(self._device)
