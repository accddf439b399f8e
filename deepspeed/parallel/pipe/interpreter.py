"""Runs a schedule: one method per instruction, on the buffers of one stage.

:class:`StageCompute` computes. The interpreter moves values between buffers and stages, and frees them. Receives are
posted before the step begins, and always one ahead. Sends are not waited for: they are released when the receiver
confirms them, or when the step ends.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any, Protocol

import torch

from deepspeed.errors import PipelineError
from deepspeed.parallel.pipe.channel import ACTIVATIONS, GRADIENTS, StageChannels
from deepspeed.parallel.pipe.schedule.lists import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)
from deepspeed.parallel.pipe.values import leaves_of, tensors_of, to_device, writable

BUFFERS = ("inputs", "labels", "outputs", "output_tensors", "gradients", "work")
_BACKWARDS = (BackwardPass, BackwardWeight)

Handler = Callable[..., None]
"""Executes one instruction; called with the keyword arguments of the instruction."""


class StageCompute(Protocol):
    """Computes the instructions of one pipeline stage, and fetches the stage's micro-batches."""

    def begin_step(self, backwards: Mapping[int, int]) -> None:
        """Sets the number of weight backwards of each chunk in the step. Called at the beginning of a step."""

    def own_items(self) -> list[Any]:
        """Returns this rank's ``(inputs, labels)`` of the step; placeholders, or fewer, where its data ran out."""

    def agree(self) -> bool:
        """Waits until all ranks have confirmed their items; returns whether the first stage sends the labels."""

    def may_begin(self) -> bool:
        """Returns whether the first forwards may run before :meth:`agree`."""

    def compute_forward(self, chunk: int, micro_batch: int, inputs: Any, labels: Any) -> Any:
        """Runs a chunk and returns its outputs; of the last chunk in training, the loss."""

    def compute_backward(
        self, chunk: int, micro_batch: int, outputs: list[torch.Tensor], gradients: list[Any] | None
    ) -> None:
        """Computes the gradients of a chunk's inputs and weights.

        ``outputs`` are what the forward returned and what needs a gradient, of any shape; ``gradients`` has for each
        one of its shape, or None. Without ``gradients`` the output is the loss.
        """

    def compute_input_gradients(
        self,
        chunk: int,
        micro_batch: int,
        outputs: list[torch.Tensor],
        gradients: list[Any] | None,
        inputs: list[torch.Tensor],
    ) -> Any:
        """Accumulates the gradients of a chunk's ``inputs`` (leaves that need one, of any shape) in their ``grad``.

        Returns what the gradients of its weights need. The other arguments are as of :meth:`compute_backward`.
        """

    def compute_weight_gradients(self, chunk: int, micro_batch: int, work: Any) -> None:
        """Computes the gradients of a chunk's weights from what :meth:`compute_input_gradients` returned."""

    def update(self) -> None:
        """Updates the weights. Every rank must call it."""


class Interpreter:
    """Executes the instructions of one pipeline stage; ``compute`` runs forwards, backwards and the update."""

    def __init__(
        self, channels: StageChannels, stage_of: tuple[int, ...], device: torch.device, compute: StageCompute
    ) -> None:
        self.channels = channels  # to other stages
        self.stage_of = stage_of  # the stage of each chunk of the model
        self.at: PipeInstruction | str = ""  # the instruction that is executed, or words; for messages
        # by kind, the value of each buffer: ``inputs`` and ``outputs`` of the stage, ``labels``, ``output_tensors``
        # that need gradients, the ``gradients`` received for them, and the weights' part of a split backward (``work``)
        self.pipe_buffers: dict[str, list[Any]] = {kind: [] for kind in BUFFERS}
        self._compute = compute
        self._device = device
        self._first_chunk = stage_of.index(channels.stage)  # of this stage
        self._has_ends = stage_of[0] == channels.stage, stage_of[-1] == channels.stage
        self._wrap: Callable[[type, Handler], Handler] | None = None
        self._items: list[Any] = []
        self._sends_labels = False
        self._handed: dict[tuple[str, int, int], Any] = {}  # values passed between chunks of this stage
        self._done: Counter[str] = Counter()  # executed instructions by kind, for schedules without micro-batch numbers

    def wrap_handlers(self, wrap: Callable[[type, Handler], Handler]) -> None:
        """Replaces each handler by ``wrap(handler)`` from now on, to measure instructions."""
        self._wrap = wrap

    # -- a step ------------------------------------------------------------------------------------------------------

    def run(
        self,
        schedule: Iterable[list[PipeInstruction]],
        own_handlers: Mapping[type, Handler] = types.MappingProxyType({}),
    ) -> None:
        """Runs one step.

        This rank sends nothing and computes no gradient before all ranks have confirmed their items. The confirmation
        overlaps with the first forwards of the first stage. The grouping of instructions in ``schedule`` is ignored;
        ``own_handlers`` replace or extend those of this class.

        Raises:
            PipelineError: An instruction has no handler.
        """
        handlers = {kind: getattr(self, name) for kind, name in METHOD_OF_INSTRUCTION.items()}
        if self._wrap is not None:
            handlers = {kind: self._wrap(kind, handler) for kind, handler in handlers.items()}
        handlers.update(own_handlers)
        commands = [command for step in schedule for command in step]
        used = [command.buffer_id for command in commands if isinstance(command, BufferOpInstruction)]
        for buffers in self.pipe_buffers.values():
            buffers[:] = [None] * (max(used, default=-1) + 1)
        self._done.clear()
        self._handed.clear()
        backwards = [command for command in commands if isinstance(command, _BACKWARDS)]
        self._compute.begin_step(Counter(command.kwargs.get("chunk", self._first_chunk) for command in backwards))
        self._post_receives(commands)
        self.at = "pulling data"
        self._items = self._compute.own_items()
        try:
            local = takewhile(lambda command: isinstance(command, (LoadMicroBatch, ForwardPass)), commands)
            first = list(local) if self._compute.may_begin() else []
            self._execute(first, handlers)
            self.at = "pulling data"
            self._sends_labels = self._compute.agree()
            with self.channels.batch():
                self._execute(commands[len(first) :], handlers)
                self.drain()
        finally:
            for buffers in self.pipe_buffers.values():
                buffers.clear()
            self._items = []

    def drain(self) -> None:
        """Waits until all sends are complete."""
        at, self.at = self.at, "waiting until everything sent has left"
        self.channels.drain()
        self.at = at

    def _execute(self, commands: list[PipeInstruction], handlers: Mapping[type, Handler]) -> None:
        for command in commands:
            handler = handlers.get(type(command))
            if handler is None:
                raise PipelineError(
                    "schedule: expected instructions of deepspeed.runtime.pipe.schedule, found "
                    f"{command!r}. Give the schedule only instructions that the pipeline engine can run"
                )
            self.at = command
            handler(**command.kwargs)

    def _post_receives(self, commands: list[PipeInstruction]) -> None:
        counts: Counter[tuple[str, int]] = Counter()
        for command in commands:
            if isinstance(command, RecvActivation):
                counts[ACTIVATIONS, self._peer(command.kwargs, -1)] += 1
            elif isinstance(command, RecvGrad):
                counts[GRADIENTS, self._peer(command.kwargs, 1)] += 1
        for (kind, peer), count in counts.items():
            if peer != self.channels.stage:
                self.channels.incoming(kind, peer).expect(count)

    def _peer(self, arguments: dict[str, Any], step: int) -> int:
        return arguments["peer"] if "peer" in arguments else self.channels.stage + step

    def _about(self, kind: str, arguments: dict[str, Any]) -> tuple[int, int]:
        """Returns chunk and micro-batch of an instruction; published schedules leave them to be counted."""
        number = self._done[kind]
        self._done[kind] += 1
        return arguments.get("chunk", self._first_chunk), arguments.get("micro_batch", number)

    # -- instructions ------------------------------------------------------------------------------------------------

    def _exec_load_micro_batch(self, buffer_id: int, **arguments: Any) -> None:
        """Puts an item, which has already been pulled, into its buffer."""
        _, micro_batch = self._about("load", arguments)
        inputs, labels = self._items[micro_batch]
        first, last = self._has_ends
        self._items[micro_batch] = (
            to_device(inputs, self._device) if first else None,
            to_device(labels, self._device) if last else labels,  # other stages may send them
        )

    def _exec_forward_pass(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("forward", arguments)
        buffers = self.pipe_buffers
        if chunk == 0:
            buffers["inputs"][buffer_id], buffers["labels"][buffer_id] = self._items[micro_batch]
            self._items[micro_batch] = (None, buffers["labels"][buffer_id])
        if chunk == len(self.stage_of) - 1 and not self._sends_labels and self._items:
            buffers["labels"][buffer_id] = self._items[micro_batch][1]
        inputs = writable(buffers["inputs"][buffer_id])
        outputs = self._compute.compute_forward(chunk, micro_batch, inputs, buffers["labels"][buffer_id])
        buffers["outputs"][buffer_id] = outputs
        buffers["output_tensors"][buffer_id] = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]

    def _exec_send_activations(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("send activation", arguments)
        value = self.pipe_buffers["outputs"][buffer_id]
        if self._sends_labels:
            value = (value, to_device(self.pipe_buffers["labels"][buffer_id], self._device))
        self._send(ACTIVATIONS, self._peer(arguments, 1), chunk + 1, micro_batch, value)
        self.pipe_buffers["outputs"][buffer_id] = None  # backward needs those with gradients only

    def _exec_recv_activations(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("receive activation", arguments)
        value = self._receive(ACTIVATIONS, self._peer(arguments, -1), chunk, micro_batch)
        if self._sends_labels:
            value, self.pipe_buffers["labels"][buffer_id] = value
        self.pipe_buffers["inputs"][buffer_id] = value

    def _exec_backward_pass(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("backward", arguments)
        outputs, gradients = self._take_for_backward(buffer_id, chunk)
        self._compute.compute_backward(chunk, micro_batch, outputs, gradients)

    def _take_for_backward(self, buffer_id: int, chunk: int) -> tuple[list[torch.Tensor], list[Any] | None]:
        buffers = self.pipe_buffers
        outputs, gradients = buffers["output_tensors"][buffer_id] or [], buffers["gradients"][buffer_id]
        buffers["outputs"][buffer_id] = buffers["output_tensors"][buffer_id] = buffers["gradients"][buffer_id] = None
        buffers["labels"][buffer_id] = None
        return outputs, (None if chunk == len(self.stage_of) - 1 else gradients)

    def _exec_backward_input(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("backward input", arguments)
        outputs, gradients = self._take_for_backward(buffer_id, chunk)
        inputs = [tensor for tensor in tensors_of(self.pipe_buffers["inputs"][buffer_id]) if tensor.requires_grad]
        self.pipe_buffers["work"][buffer_id] = self._compute.compute_input_gradients(
            chunk, micro_batch, outputs, gradients, inputs
        )

    def _exec_backward_weight(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("backward weight", arguments)
        work, self.pipe_buffers["work"][buffer_id] = self.pipe_buffers["work"][buffer_id], None
        self._compute.compute_weight_gradients(chunk, micro_batch, work)

    def _exec_send_grads(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("send gradient", arguments)
        inputs = self.pipe_buffers["inputs"][buffer_id]
        gradients = [tensor.grad for tensor in tensors_of(inputs) if tensor.requires_grad]
        self._send(GRADIENTS, self._peer(arguments, -1), chunk - 1, micro_batch, gradients)
        self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("receive gradient", arguments)
        self.pipe_buffers["gradients"][buffer_id] = self._receive(
            GRADIENTS, self._peer(arguments, 1), chunk, micro_batch
        )

    def _exec_reduce_tied_grads(self) -> None:
        """Does nothing: the update reduces tied weights, as their stages do not finish together."""

    def _exec_reduce_grads(self) -> None:
        """Does nothing: the backward that fills a bucket for the last time reduces it."""

    def _exec_optimizer_step(self) -> None:
        self.at = "updating the weights"
        self._compute.update()

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _send(self, kind: str, peer: int, chunk: int, micro_batch: int, value: Any) -> None:
        if peer == self.channels.stage:
            self._handed[kind, chunk, micro_batch] = value
        else:
            self.channels.outgoing(kind, peer).send(micro_batch, value)

    def _receive(self, kind: str, peer: int, chunk: int, micro_batch: int) -> Any:
        if peer != self.channels.stage:
            return self.channels.incoming(kind, peer).take(micro_batch)
        value = self._handed.pop((kind, chunk, micro_batch))
        return leaves_of(value) if kind == ACTIVATIONS else value


METHOD_OF_INSTRUCTION: dict[type, str] = {
    OptimizerStep: "_exec_optimizer_step",
    ReduceGrads: "_exec_reduce_grads",
    ReduceTiedGrads: "_exec_reduce_tied_grads",
    LoadMicroBatch: "_exec_load_micro_batch",
    ForwardPass: "_exec_forward_pass",
    BackwardPass: "_exec_backward_pass",
    BackwardInput: "_exec_backward_input",
    BackwardWeight: "_exec_backward_weight",
    SendActivation: "_exec_send_activations",
    RecvActivation: "_exec_recv_activations",
    SendGrad: "_exec_send_grads",
    RecvGrad: "_exec_recv_grads",
}
"""Names of the methods of :class:`Interpreter`, which are also names of methods of ``PipelineEngine``."""
