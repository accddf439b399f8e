"""The instructions of a pipeline stage, with the published names and attributes.

``schedule.lists`` derives those of one stage from the computations of all stages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any


class PipeInstruction:
    """One instruction; its keyword arguments are also its attributes.

    Two are equal if they are of one class with equal arguments.

    Attributes:
        name: Name of the class.
        kwargs: The keyword arguments.
        words: What the class of instructions does, for messages.
    """

    words = ""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.kwargs.items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.kwargs == other.kwargs  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), *self.kwargs.items()))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no argument {name!r}")

    def describe(self) -> str:
        """Returns the instruction in words, for messages: ``forward of micro-batch 2``.

        Instructions of the published schedules carry no micro-batch; their buffer is named instead.
        """
        words = self.words or self.name
        if "micro_batch" in self.kwargs:
            return f"{words} of micro-batch {self.kwargs['micro_batch']}"
        return f"{words} in buffer {self.kwargs['buffer_id']}" if "buffer_id" in self.kwargs else words


class OptimizerStep(PipeInstruction):
    """Update the weights; all gradients of the step are there."""

    words = "update of the weights"


class ReduceGrads(PipeInstruction):
    """Combine the gradients of the stage over its data-parallel ranks."""

    words = "reduction of the gradients"


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied weights over the stages that hold them."""

    words = "reduction of tied gradients"


class BufferOpInstruction(PipeInstruction):
    """An instruction about one micro-batch in flight.

    Those of a :class:`~deepspeed.parallel.pipe.schedule.lists.StageSchedule` carry all of these, those of the
    published schedules ``buffer_id`` only.

    Attributes:
        buffer_id: Which buffer of the stage holds the micro-batch, from 0. Reused when its backward is done.
        micro_batch: Number of the micro-batch in the step, from 0.
        chunk: Number of the chunk in the model, from 0: not the place among the stage's chunks.
    """

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Pulls the next item of the data. Issued once per micro-batch, on stages with the first or the last chunk."""

    words = "loading"


class ForwardPass(BufferOpInstruction):
    """Compute the chunk's outputs, for the last chunk the loss.

    Attributes:
        is_first: No forward of this chunk came before in this step.
        is_last: None comes after.
    """

    words = "forward"


class BackwardPass(BufferOpInstruction):
    """Compute the gradients of the chunk's inputs and weights. ``is_first``, ``is_last`` as in a forward."""

    words = "backward"


class BackwardInput(BufferOpInstruction):
    """Compute the gradients of the chunk's inputs only; the previous chunk waits for them."""

    words = "backward to the inputs"


class BackwardWeight(BufferOpInstruction):
    """Compute the gradients of the chunk's weights, after the :class:`BackwardInput` of the same micro-batch.

    ``is_first`` and ``is_last`` as in a forward.
    """

    words = "backward to the weights"


class SendActivation(BufferOpInstruction):
    """Send the chunk's outputs to the next chunk.

    Attributes:
        peer: The stage that holds the other chunk; the stage itself where neighboring chunks lie on one.
    """

    words = "sending the activations"


class RecvActivation(BufferOpInstruction):
    """Receive the chunk's inputs from the previous chunk, on stage ``peer``."""

    words = "receiving the activations"


class SendGrad(BufferOpInstruction):
    """Send the gradients of the chunk's inputs to the previous chunk, on stage ``peer``."""

    words = "sending the gradients"


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of the chunk's outputs from the next chunk, on stage ``peer``."""

    words = "receiving the gradients"


class PipeSchedule(ABC):
    """The instructions of one stage for one step; iterating gives them in lists, which are called steps.

    Args:
        micro_batches: Micro-batches of the step.
        stages: Stages of the pipeline.
        stage_id: The stage that runs the instructions, from 0.

    Raises:
        ValueError: There is no micro-batch, or no such stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if micro_batches < 1 or not 0 <= stage_id < stages:
            raise ValueError(
                f"{type(self).__name__}(micro_batches={micro_batches}, stages={stages}, stage_id={stage_id}): at least "
                "one micro-batch is needed, and a stage_id from 0 to below stages"
            )
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Gives the instructions, in order."""

    def num_pipe_buffers(self) -> int:
        """Returns how many micro-batches the stage holds at once, at most."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return iter(self.steps())

    @property
    def stage(self) -> int:
        """The stage that runs the instructions."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """This stage holds the first layer."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """This stage computes the loss."""
        return self.stage_id == self.stages - 1

    # Programs that bring a schedule of their own call these three.
    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        return micro_batch_id % self.num_pipe_buffers()
