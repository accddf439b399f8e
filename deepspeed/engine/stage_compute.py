"""Computes the instructions of a pipeline stage: its chunks by the engine's training step, and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from deepspeed.axes import PIPE
from deepspeed.comm.job import backward_comm
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.comm.transports.transport import Transport
from deepspeed.engine.batches import Batches
from deepspeed.engine.loss_counter import checked_count, checked_metric, mean_of_sum, read_counts, refuse_bad_counts
from deepspeed.engine.mean_outputs import mean_outputs
from deepspeed.engine.progress import ProgressLog
from deepspeed.engine.reminders import paired_roots
from deepspeed.engine.train_step import TrainStep
from deepspeed.errors import CommunicationError, DivergenceError, PipelineError
from deepspeed.parallel.pipe.data import DataAgreement, DataError, DataFeed, agree_on_data, parts_of
from deepspeed.parallel.pipe.interpreter import StageCompute
from deepspeed.parallel.pipe.split import backward_to_inputs
from deepspeed.parallel.pipe.stage_layers import StageLayers, split_losses
from deepspeed.parallel.pipe.values import detached, shapes_of
from deepspeed.zero.runtime import MicroBatch, ModelChunk

_NO_ITEM = (None, None)  # placeholder for stages without data


class PipelineCompute(StageCompute):
    """Computes the chunks of one pipeline stage.

    Args:
        reduces_each: Reduce after every micro-batch (stage 3); otherwise gradients are summed on this rank and reduced
            by the backward that closes them.
    """

    def __init__(
        self,
        module: StageLayers,
        step: TrainStep,
        batches: Batches,
        progress: ProgressLog,
        *,
        job: Job,
        everybody: Transport,
        rank: int,
        device: torch.device,
        failures: StageFailures,
        reduces_each: bool,
        splits_backward: bool,
        after_update: Callable[[], None],
    ) -> None:
        self.feed = DataFeed()  # the iterator of this rank's items
        # whether the last chunk of the model is on this stage
        self.is_last = len(module.stage_of_chunks) - 1 in module.chunks
        # whether this stage needs items: it has the first or the last chunk
        self.pulls_data = 0 in module.chunks or self.is_last
        # mean loss of the last step over micro-batches and copies of the model: 0-dim, fp32
        self.agg_train_loss: torch.Tensor | None = None
        self.total_loss: torch.Tensor | None = None  # mean loss of the last step over micro-batches, on the last stage
        self.loss: torch.Tensor | None = None  # the loss of the last micro-batch, on the last stage
        self.fwd_outputs: list[Any] = []  # what the last evaluation computed for each micro-batch, on the last stage
        # means over micro-batches and copies of what the loss function returned beside the loss
        self.metrics: dict[str, float] = {}
        self._module, self._step, self._batches, self._progress = module, step, batches, progress
        self._job, self._everybody, self._mesh, self._rank, self._device = job, everybody, module.mesh, rank, device
        self._failures = failures
        self._reduces_each = reduces_each
        self._splits_backward = splits_backward
        self._after_update = after_update
        self._parameters_of = {chunk: frozenset(module.parameters_of(chunk)) for chunk in module.chunks}
        self._last_chunk = len(module.stage_of_chunks) - 1
        self._backwards_left: Counter[int] = Counter()  # per chunk, weight backwards that have not started
        self._found = MicroBatchLosses()
        self._mode, self._count = "", 0  # train, loss or outputs; micro-batches
        self._agreed: Callable[[], DataAgreement] | None = None
        self._has_all_items = False
        self._has_run_first = False

    # -- data --------------------------------------------------------------------------------------------------------

    def get_ready(self, call: str, count: int, mode: str) -> None:
        """Pulls the items of a step and starts their comparison with the other ranks' items.

        Args:
            call: What the program called: train_batch, eval_batch or _exec_schedule.
            mode: What is computed: ``train``, ``loss`` or ``outputs``.

        Raises:
            PipelineError: An earlier call failed.
        """
        self._failures.refuse_after_failure(call)
        self._mode, self._count = mode, count
        self._module.failed_at = ""
        self._found, self.fwd_outputs = MicroBatchLosses(), []
        feed = self.feed if self.pulls_data else None
        needs_labels = mode != "outputs" and self._module.loss_fn is not None
        with self._failures.shared(call):
            self._agreed = agree_on_data(
                self._everybody, self._mesh, self._rank, feed, count, call, needs_labels=needs_labels
            )

    @override
    def own_items(self) -> list[Any]:
        if self._agreed is None:  # the program runs a schedule of its own
            self.get_ready("_exec_schedule", self._batches.gradient_accumulation_steps(), "train")
        items: list[Any] = []
        if self.pulls_data:
            has_any = self.feed.has_any
            items = list(map(parts_of, self.feed.ready(self._count))) if has_any else [_NO_ITEM] * self._count
        self._has_all_items = self.feed.has_any and len(items) == self._count
        return items

    @override
    def may_begin(self) -> bool:  # each stage is one rank, with all its items
        return self._module.num_stages == self._mesh.world_size and self._has_all_items

    @override
    def agree(self) -> bool:
        assert self._agreed is not None
        agreed, self._agreed = self._agreed, None
        found = agreed()
        self.feed.use_up(self._count)
        self._step.counts.expect(found.label_numel)
        return found.sends_labels

    # -- computations ------------------------------------------------------------------------------------------------

    @override
    def begin_step(self, backwards: Mapping[int, int]) -> None:
        self._backwards_left = Counter(backwards)  # a chunk's last one reduces

    @override
    def compute_forward(self, chunk: int, micro_batch: int, inputs: Any, labels: Any) -> Any:
        module = self._module
        module.active_chunk = chunk
        try:
            # Only the first chunk gets the program's data. The schedule runs all backwards, so none is announced.
            with self._progress.named(f"chunk {chunk}, micro-batch {micro_batch}: forward"):
                outputs = self._step.forward(
                    module, (inputs,), {}, is_training=module.training, has_data=chunk == 0, announces=False
                )
        finally:
            module.active_chunk = None
        if chunk != self._last_chunk:
            return outputs
        outputs, added = split_losses(outputs)
        if self._mode != "train":
            self.fwd_outputs.append(detached(outputs))
        if self._mode == "outputs":
            return outputs
        given = split_loss(self._loss_of(outputs, labels), has_loss_fn=module.loss_fn is not None)
        loss, count = given.loss, given.count
        if added and count is None:
            loss = sum(added.values(), start=loss.float().reshape(()))
        elif added:  # means, weighted by the tokens of the micro-batch
            loss = loss.float().reshape(()) + torch.stack(list(added.values())).sum() * count
        shown = {name: term.detach() for name, term in added.items()}
        metrics = {**given.metrics, **shown, **(module.get_additional_losses() or {})}
        self.loss = self._found.add(micro_batch, loss, metrics, count)
        return loss

    def _loss_of(self, outputs: Any, labels: Any) -> Any:
        """Returns the result of ``loss_fn`` for a micro-batch; without it, the outputs."""
        module = self._module
        if module.loss_fn is None:
            return outputs
        try:
            return module.loss_fn(outputs, labels)
        except Exception:
            name = getattr(module.loss_fn, "__name__", type(module.loss_fn).__name__)
            module.failed_at = f"loss_fn {name}, outputs {shapes_of(outputs)}, labels {shapes_of(labels)}"
            raise

    @override
    def compute_backward(
        self,
        chunk: int,
        micro_batch: int,
        outputs: list[torch.Tensor],
        gradients: list[Any] | None,
        *,
        closes: bool = True,  # whether no weight gradients of this micro-batch are computed later
    ) -> None:
        current = self._micro_batch(chunk, micro_batch, closes=closes)
        self._check_loss(outputs, gradients, micro_batch)
        if not outputs:
            return  # neither this stage nor those before it train anything
        with self._progress.named(f"chunk {chunk}, micro-batch {micro_batch}: backward"):
            if gradients is None:
                self._step.backward_of_loss(outputs[0], current, count=self._found.counts[micro_batch])
            elif any(gradient is not None for gradient in gradients):
                self._step.backward(outputs, gradients, current)

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
            return outputs, gradients  # no stage waits for gradients: everything is computed with the weights
        # Experts exchange tokens in backward. Every rank must do so exactly once, with or without tokens.
        is_whole = self._module.activation_checkpoint_interval > 0 or backward_comm.is_uneven()
        if is_whole or not self._splits_backward:
            self.compute_backward(chunk, micro_batch, outputs, gradients, closes=False)
            return None
        count = None
        if gradients is None:
            count = self._found.counts[micro_batch]
            parts = self._step.begin_loss(count, self._count)
            roots = [self._step.loss_and_root(outputs[0], count=count, parts=parts)[1]]
            given = [torch.ones_like(roots[0])]
        elif any(gradient is not None for gradient in gradients):
            roots, given = paired_roots(outputs, gradients)
        else:
            return None
        current = self._micro_batch(chunk, micro_batch, closes=False)
        work = self._step.run_backward(lambda: backward_to_inputs(roots, given, inputs), current)
        if count is not None:
            self._step.counts.add(count)
        return work

    @override
    def compute_weight_gradients(self, chunk: int, micro_batch: int, work: Any) -> None:
        if isinstance(work, tuple):
            self.compute_backward(chunk, micro_batch, *work)
            return
        current = self._micro_batch(chunk, micro_batch)
        with self._progress.named(f"chunk {chunk}, micro-batch {micro_batch}: backward of weights"):
            self._step.run_backward(lambda: None if work is None else work.run(), current)

    def _check_loss(self, outputs: list[torch.Tensor], gradients: list[Any] | None, micro_batch: int) -> None:
        if gradients is None and not outputs and any(p.requires_grad for p in self._module.parameters()):
            raise PipelineError(
                f"the loss of micro-batch {micro_batch} needs no gradient, though weights before it are trained; let "
                "loss_fn compute it from the outputs without detach() or no_grad()"
            )

    def _micro_batch(self, chunk: int, micro_batch: int, *, closes: bool = True) -> MicroBatch:
        """Counts a backward and returns its micro-batch; ``closes`` as in :meth:`compute_backward`."""
        reaches, left = self._parameters_of[chunk], self._backwards_left
        closed: frozenset[nn.Parameter] = frozenset()
        if closes:
            left[chunk] -= 1
        if closes and left[chunk] <= 0:
            closed = reaches.difference(*(self._parameters_of[other] for other, count in left.items() if count > 0))
        is_first, self._has_run_first = not self._has_run_first, True
        part = ModelChunk(reaches, closes=closed, reduces_each=self._reduces_each and closes)
        return MicroBatch(micro_batch, is_first=is_first, is_last=not any(left.values()), part=part)

    # -- results -----------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Updates the weights. The losses are sent in the update's exchange. Every rank must call it."""
        count = self._batches.gradient_accumulation_steps()
        self._has_run_first = False
        found = self._found if self.is_last else None
        if found is not None:
            self.total_loss = found.mean
        report = self._step.update(extra=row_of(found, count), micro_batches=count)
        assert report is not None, "a schedule ends in an update"
        _, mean, self.metrics = read_rows(self._everybody, self._mesh, self._rank, report.extra, found)
        self.agg_train_loss = torch.tensor(mean, device=self._device)
        if found is None:
            self._progress.loss(self.agg_train_loss)
        self._after_update()

    def evaluated(self, reduce_output: str | None, *, shares_loss: bool) -> Any:
        """Returns the result of the last evaluation. Every rank must call it.

        Args:
            reduce_output: ``avg``: the mean over micro-batches and copies of the model; None: a list, one entry for
                each micro-batch of this copy.
            shares_loss: Give the loss to every rank, not to the last stage only.
        """
        if self._mode == "outputs":
            outputs = self.fwd_outputs if self.is_last else None
            if reduce_output is None:
                return outputs
            return mean_outputs(self._job, self._everybody, self._mesh, outputs)
        each, mean = [float(loss) for loss in self._found.losses], self._found.mean
        if shares_loss or reduce_output == "avg":
            found = self._found if self.is_last else None
            each, average, self.metrics = share_losses(self._everybody, self._mesh, self._rank, found, self._count)
            mean = torch.tensor(average)
        if not shares_loss and not self.is_last:
            return None
        if reduce_output is None:
            return [torch.tensor(loss, device=self._device) for loss in each]
        return mean.to(self._device)


class StageFailures:
    """Ends a call on every rank with the message of the first rank that fails in it."""

    def __init__(self, job: Transport, place: Callable[[str], str]) -> None:
        self._job = job
        self._place = place
        self._message = ""  # of the failure that closed the connections between the ranks

    def refuse_after_failure(self, call: str) -> None:
        """Raises PipelineError if an earlier call failed: the ranks are no longer connected."""
        if self._message:
            raise PipelineError(
                f"{call}: an earlier call failed, and the ranks are no longer connected. {self._message}. Start the "
                "job again, from its last checkpoint"
            )

    @contextmanager
    def shared(self, call: str) -> Iterator[None]:
        """Reports an exception of the block to all ranks; it ends the step and the connections of the ranks.

        Raises:
            PipelineError: The block raised, or another rank reported a failure; with the same message on every rank.
        """
        try:
            yield
        except (CommunicationError, DivergenceError) as error:
            is_reported = str(error).startswith(f"{call}: ")
            message = str(error) if is_reported else f"{self._place(call)}: {error}"
            self._message = message
            raise PipelineError(message) from (None if is_reported else error)
        except DataError:
            raise
        except Exception as error:
            what = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
            message = f"{self._place(call)}: {what}"
            if self._job.watch is not None:  # there are other ranks
                self._message = message
                self._job.watch.post_failure(message)
            raise PipelineError(message) from error


# -- losses, sent to every rank and averaged over the copies of the model ----------------------------------------------


class MicroBatchLosses:
    """Losses of one step on one rank, and the metrics returned with them."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []  # mean loss of each micro-batch: 0-dim, fp32
        # by micro-batch, the tokens of a loss that is a sum; None for one that is a mean
        self.counts: dict[int, Any] = {}
        self._metrics: dict[str, tuple[torch.Tensor, int]] = {}  # sum and number of micro-batches per metric

    def add(self, micro_batch: int, loss: torch.Tensor, metrics: Mapping[str, Any], count: Any) -> torch.Tensor:
        """Adds the loss and the metrics of a micro-batch; they stay on the device.

        Args:
            loss: One element, of any shape.
            metrics: Numbers or tensors of one element, by name.
            count: Tokens that ``loss`` is a sum over, as :func:`checked_count` returns them; None: it is a mean.

        Returns:
            The mean loss without its graph, of the shape of ``loss``.

        Raises:
            PipelineError: A metric is no number.
        """
        mean = loss.detach() if count is None else mean_of_sum(loss.detach(), count)
        self.losses.append(mean.float().reshape(()))
        self.counts[micro_batch] = count
        for name, value in metrics.items():
            number = checked_metric(name, value, loss.device)
            total, given = self._metrics.get(name, (torch.zeros_like(number), 0))
            self._metrics[name] = total + number, given + 1
        return mean

    @property
    def weights(self) -> list[Any]:
        """Weight of each micro-batch in the mean loss: its tokens, or 1 where losses are means."""
        return [1.0 if count is None else count for count in self.counts.values()]

    @property
    def mean(self) -> torch.Tensor:
        """Returns the mean loss over the micro-batches, or over their tokens: 0-dim, fp32."""
        if not self.losses:
            return torch.tensor(0.0)
        losses = torch.stack(self.losses)
        if all(count is None for count in self.counts.values()):
            return losses.mean()
        weights = torch.stack([torch.as_tensor(weight, device=losses.device).float() for weight in self.weights])
        return (losses * weights).sum() / weights.sum().clamp(min=1)

    @property
    def metrics(self) -> dict[str, float]:
        """Returns the mean of each metric over the micro-batches that have it."""
        return {name: float(total) / count for name, (total, count) in self._metrics.items()}


class GivenLoss(NamedTuple):
    """The result of a loss function: the loss, the tokens it is a sum over (None: a mean), the metrics."""

    loss: torch.Tensor
    count: Any
    metrics: Mapping[str, Any]


def split_loss(value: Any, *, has_loss_fn: bool) -> GivenLoss:
    """Returns the loss, its count and the metrics of a micro-batch.

    Args:
        value: What the loss function returned; without one, what the last layer returned: a mean, ``(mean, metrics)``,
            ``(sum, count)`` or ``(sum, count, metrics)``.

    Raises:
        DeepSpeedConfigError: The count is no count.
        PipelineError: It is none of the four, or the loss is no tensor of one element.
    """
    loss, count, metrics = value, None, None
    if isinstance(value, tuple) and len(value) in (2, 3):
        loss, *others = value
        if others[-1] is None or isinstance(others[-1], Mapping):
            metrics = others.pop()
        if others:
            count = checked_count(others[0], "PipelineModule(loss_fn=...), which returned (sum, count)")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        if has_loss_fn:
            raise PipelineError(
                f"PipelineModule(loss_fn=...): expected a tensor of one element, (loss, metrics) with a dict of "
                f"metrics, or (sum, count); the function returned {found}. Reduce it in loss_fn, with mean() or sum()"
            )
        raise PipelineError(
            f"PipelineModule(loss_fn=None): the output of the last layer is the loss then, expected a tensor of one "
            f"element, found {found}. Pass PipelineModule(..., loss_fn=...), called as loss_fn(outputs, labels)"
        )
    return GivenLoss(loss, count, metrics or {})


def row_of(found: MicroBatchLosses | None, count: int) -> list[float]:
    """Returns the numbers that a rank sends to all others."""
    if found is None:
        return [0.0] * (2 * count + 2)
    values = torch.stack(found.losses).double().tolist() if found.losses else []
    weights, missing = read_counts(found.weights), [0.0] * (count - len(values))
    return [1.0, float(bool(found.metrics)), *values, *missing, *weights, *missing]


def read_rows(
    job: Transport, mesh: Mesh, rank: int, rows: torch.Tensor, found: MicroBatchLosses | None
) -> tuple[list[float], float, dict[str, float]]:
    """Reads the rows of all ranks of the job. Every rank must call it: metrics are sent if there are any.

    Args:
        rows: :func:`row_of` of each rank: 2-D, fp64.
        found: What a rank with the last chunk has; None elsewhere.

    Returns:
        The losses of this rank's copy of the model by micro-batch, the mean over micro-batches and copies (over the
        tokens where losses are sums), and of each metric the mean over the copies that gave it.

    Raises:
        DeepSpeedConfigError: A count is negative or not finite; the same on every rank.
    """
    senders = [other for other, row in enumerate(rows.tolist()) if row[0]]
    if not senders:  # the planner simulates one rank, which may not have the last chunk
        return [0.0] * ((rows.shape[1] - 2) // 2), 0.0, {}
    losses, weights = rows[:, 2:].chunk(2, dim=1)
    refuse_bad_counts(weights)
    metrics: dict[str, float] = {}
    if bool(rows[:, 1].any()):
        mine_given = list(found.metrics.items()) if found is not None else []
        given = [dict(pairs) for pairs in gather_objects(job, mine_given, label="the metrics of the step") if pairs]
        for name in dict.fromkeys(name for each in given for name in each):
            values = [each[name] for each in given if name in each]
            metrics[name] = sum(values) / len(values)
    pipeline = mesh.group(rank, PIPE)
    mine = next(losses[other].tolist() for other in senders if other in pipeline)
    losses, weights = losses[senders], weights[senders]
    if bool((weights == 1).all()):
        return mine, float(losses.mean()), metrics
    return mine, float((losses * weights).sum() / weights.sum().clamp(min=1)), metrics


def share_losses(
    job: Transport, mesh: Mesh, rank: int, found: MicroBatchLosses | None, count: int
) -> tuple[list[float], float, dict[str, float]]:
    """Sends the losses to all ranks and returns what :func:`read_rows` does. Every rank must call it."""
    row = torch.tensor(row_of(found, count), dtype=torch.float64)
    rows = job.gather_small(row, channel="call", label="the losses of the step")
    return read_rows(job, mesh, rank, rows, found)
