"""Runs a schedule: one method per instruction, on the buffers of one stage.

What an instruction computes is the engine's business (``compute_*``); what is here is where values come from, where
they go and when they are let go of. Receives are posted before the step begins and ahead of those that are waited for;
sends are started and left alone, until the other side has said that it has them or the step ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, ClassVar

import torch

from deepspeed.errors import PipelineError
from deepspeed.parallel.pipe.channel import ACTIVATIONS, GRADIENTS
from deepspeed.parallel.pipe.schedule import instructions as told
from deepspeed.parallel.pipe.values import leaves_of, tensors_of, to_device, writable
from deepspeed.parallel.pipe.wires import StageWires

BUFFERS = ("inputs", "labels", "outputs", "output_tensors", "gradients", "work")
_BACKWARDS = (told.BackwardPass, told.BackwardWeight)


def _needs_nobody(command: told.PipeInstruction) -> bool:
    return isinstance(command, (told.LoadMicroBatch, told.ForwardPass))


class _Standing:
    """Where in a step a stage is: apart from the engine, which as a module looks at every assignment.

    Attributes:
        at: An instruction, or words.
    """

    at: Any = ""


class Interpreter:
    """What a stage does when it is told something.

    Attributes:
        pipe_buffers: By kind, the value of each buffer: ``inputs`` and ``outputs`` of the stage, ``labels``,
            ``output_tensors`` that gradients come back for, the ``gradients`` that came, and the weights' part of a
            split backward (``work``).
    """

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {}

    def start_interpreter(self, wires: StageWires, stage_of: tuple[int, ...], device: torch.device) -> None:
        """Gives it what it works with.

        Args:
            wires: The channels to other stages.
            stage_of: The stage of each chunk of the model.
            device: Where the model computes.
        """
        self._wires = wires
        self._stage_of = stage_of
        self._first_chunk = stage_of.index(wires.stage)  # of this stage
        self._has_ends = stage_of[0] == wires.stage, stage_of[-1] == wires.stage
        self._device = device
        self.pipe_buffers: dict[str, list[Any]] = {kind: [] for kind in BUFFERS}
        self._items: list[Any] = []
        self._labels_travel = False
        self._handed: dict[tuple[str, int, int], Any] = {}  # between chunks of this stage
        self._done: Counter[str] = Counter()  # instructions of each kind, for schedules that number nothing
        self._remaining: Counter[int] = Counter()  # backwards of each chunk
        self._standing = _Standing()

    # -- the engine's part -------------------------------------------------------------------------------------------

    def compute_forward(self, chunk: int, micro_batch: int, inputs: Any, labels: Any) -> Any:
        """Runs a chunk; of the last one the result is the loss in training, and the outputs are noted."""
        raise NotImplementedError

    def compute_backward(
        self, chunk: int, micro_batch: int, outputs: list[torch.Tensor], gradients: list[Any] | None
    ) -> None:
        """Computes the gradients of a chunk's inputs and weights."""
        raise NotImplementedError

    def compute_input_gradients(
        self,
        chunk: int,
        micro_batch: int,
        outputs: list[torch.Tensor],
        gradients: list[Any] | None,
        inputs: list[torch.Tensor],
    ) -> Any:
        """Computes the gradients of a chunk's inputs, and gives what those of the weights need."""
        raise NotImplementedError

    def compute_weight_gradients(self, chunk: int, micro_batch: int, work: Any) -> None:
        """Computes the gradients of a chunk's weights."""
        raise NotImplementedError

    def own_items(self) -> list[Any]:
        """This rank's pairs ``(inputs, labels)`` of the step, as far as it has them."""
        raise NotImplementedError

    def agree(self) -> bool:
        """Returns once all ranks are known to have their items: whether labels travel from the first stage."""
        raise NotImplementedError

    def may_begin(self) -> bool:
        """Whether the first forwards may run before that, as they need nobody else."""
        raise NotImplementedError

    # -- a step ------------------------------------------------------------------------------------------------------

    def _exec_schedule(self, pipe_schedule: Iterable[list[told.PipeInstruction]]) -> None:
        """Runs one step.

        Nothing leaves this rank, and no gradient is computed, before all ranks are known to have their items. They tell
        each other while the first stage computes its first forwards.

        Raises:
            PipelineError: Nobody knows an instruction.
        """
        steps = list(pipe_schedule)
        commands = [command for step in steps for command in step]
        room = [command.buffer_id for command in commands if isinstance(command, told.BufferOpInstruction)]
        for buffers in self.pipe_buffers.values():
            buffers[:] = [None] * (max(room, default=-1) + 1)
        self._done.clear()
        self._handed.clear()
        self._remaining = Counter(
            command.kwargs.get("chunk", self._first_chunk) for command in commands if isinstance(command, _BACKWARDS)
        )
        self._post_receives(commands)
        self._items = self.own_items()
        try:
            begun = list(takewhile(_needs_nobody, commands)) if self.may_begin() else []
            self._run(begun)
            self._labels_travel = self.agree()
            self._run(commands[len(begun) :])
            self._standing.at = "waiting until everything sent has left"
            self._wires.drain()
        finally:
            for buffers in self.pipe_buffers.values():
                buffers.clear()
            self._items = []

    def _run(self, commands: list[told.PipeInstruction]) -> None:
        known, standing = self._INSTRUCTION_MAP, self._standing
        for command in commands:
            kind = type(command)
            if kind not in known:
                raise PipelineError(
                    f"the schedule has the instruction {command!r}, which {type(self).__name__}._INSTRUCTION_MAP does "
                    "not know"
                )
            standing.at = command
            known[kind](self, **command.kwargs)

    def _post_receives(self, commands: list[told.PipeInstruction]) -> None:
        counts: Counter[tuple[str, int]] = Counter()
        for command in commands:
            if isinstance(command, told.RecvActivation):
                counts[ACTIVATIONS, self._peer(command.kwargs, -1)] += 1
            elif isinstance(command, told.RecvGrad):
                counts[GRADIENTS, self._peer(command.kwargs, 1)] += 1
        for (kind, peer), count in counts.items():
            if peer != self._wires.stage:
                self._wires.incoming(kind, peer).expect(count)

    def _peer(self, arguments: dict[str, Any], step: int) -> int:
        return arguments["peer"] if "peer" in arguments else self._wires.stage + step

    def _about(self, kind: str, arguments: dict[str, Any]) -> tuple[int, int]:
        """Chunk and micro-batch of an instruction; published schedules leave them to be counted."""
        number = self._done[kind]
        self._done[kind] += 1
        return arguments.get("chunk", self._first_chunk), arguments.get("micro_batch", number)

    # -- instructions ------------------------------------------------------------------------------------------------

    def _exec_load_micro_batch(self, buffer_id: int, **arguments: Any) -> None:
        """Puts an item of the data, which has been pulled already, where the computations find it."""
        _, micro_batch = self._about("load", arguments)
        inputs, labels = self._items[micro_batch]
        first, last = self._has_ends
        self._items[micro_batch] = (
            to_device(inputs, self._device) if first else None,
            to_device(labels, self._device) if last else labels,  # elsewhere they may travel
        )

    def _exec_forward_pass(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("forward", arguments)
        buffers = self.pipe_buffers
        if chunk == 0:
            buffers["inputs"][buffer_id], buffers["labels"][buffer_id] = self._items[micro_batch]
            self._items[micro_batch] = (None, buffers["labels"][buffer_id])
        if chunk == len(self._stage_of) - 1 and not self._labels_travel and self._items:
            buffers["labels"][buffer_id] = self._items[micro_batch][1]
        inputs = writable(buffers["inputs"][buffer_id])
        outputs = self.compute_forward(chunk, micro_batch, inputs, buffers["labels"][buffer_id])
        buffers["outputs"][buffer_id] = outputs
        buffers["output_tensors"][buffer_id] = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]

    def _exec_send_activations(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("send activation", arguments)
        value = self.pipe_buffers["outputs"][buffer_id]
        if self._labels_travel:
            value = (value, to_device(self.pipe_buffers["labels"][buffer_id], self._device))
        self._send(ACTIVATIONS, self._peer(arguments, 1), chunk + 1, micro_batch, value)
        self.pipe_buffers["outputs"][buffer_id] = None  # backward needs those with gradients only

    def _exec_recv_activations(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("receive activation", arguments)
        value = self._receive(ACTIVATIONS, self._peer(arguments, -1), chunk, micro_batch)
        if self._labels_travel:
            value, self.pipe_buffers["labels"][buffer_id] = value
        self.pipe_buffers["inputs"][buffer_id] = value

    def _exec_backward_pass(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("backward", arguments)
        self._remaining[chunk] -= 1
        outputs, gradients = self._take_for_backward(buffer_id, chunk)
        self.compute_backward(chunk, micro_batch, outputs, gradients)

    def _take_for_backward(self, buffer_id: int, chunk: int) -> tuple[list[torch.Tensor], list[Any] | None]:
        buffers = self.pipe_buffers
        outputs, gradients = buffers["output_tensors"][buffer_id] or [], buffers["gradients"][buffer_id]
        buffers["outputs"][buffer_id] = buffers["output_tensors"][buffer_id] = buffers["gradients"][buffer_id] = None
        buffers["labels"][buffer_id] = None
        return outputs, (None if chunk == len(self._stage_of) - 1 else gradients)

    def _exec_backward_input(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("backward input", arguments)
        outputs, gradients = self._take_for_backward(buffer_id, chunk)
        inputs = [tensor for tensor in tensors_of(self.pipe_buffers["inputs"][buffer_id]) if tensor.requires_grad]
        self.pipe_buffers["work"][buffer_id] = self.compute_input_gradients(
            chunk, micro_batch, outputs, gradients, inputs
        )

    def _exec_backward_weight(self, buffer_id: int, **arguments: Any) -> None:
        chunk, micro_batch = self._about("backward weight", arguments)
        self._remaining[chunk] -= 1
        work, self.pipe_buffers["work"][buffer_id] = self.pipe_buffers["work"][buffer_id], None
        self.compute_weight_gradients(chunk, micro_batch, work)

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

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _send(self, kind: str, peer: int, chunk: int, micro_batch: int, value: Any) -> None:
        if peer == self._wires.stage:
            self._handed[kind, chunk, micro_batch] = value
        else:
            self._wires.outgoing(kind, peer).send(micro_batch, value)

    def _receive(self, kind: str, peer: int, chunk: int, micro_batch: int) -> Any:
        if peer != self._wires.stage:
            return self._wires.incoming(kind, peer).take(micro_batch)
        value = self._handed.pop((kind, chunk, micro_batch))
        return leaves_of(value) if kind == ACTIVATIONS else value
