"""The schedules of one chunk per stage in their published forms: steps of instructions, seen from one stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from deepspeed.parallel.pipe.schedule.instructions import (
    BackwardPass,
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


class PipeSchedule(ABC):
    """The instructions of one stage for one step; iterating gives them in lists, which are called steps.

    Args:
        micro_batches: Micro-batches of the step.
        stages: Stages of the pipeline.
        stage_id: The stage that runs the instructions, from 0.
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


class TrainSchedule(PipeSchedule):
    """1F1B: forwards and backwards in turn (Narayanan et al. 2021, "PipeDream-Flush").

    On stage s of p, forward i is step 2 i + s and backward i step 2 i + 2 p - 1 - s. What a step computed is sent at
    the beginning of the next.
    """

    def num_pipe_buffers(self) -> int:
        """Number of stages after this one plus 1, at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """``2 (micro_batches + stages - 1)`` steps, empty ones among them."""
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        previous = -1
        for step in range(last + 1):
            micro_batch, is_forward = self._step_to_micro_batch(step)
            buffer, before = self._buffer_idx(micro_batch), self._buffer_idx(previous)
            is_here, was_here = self._valid_micro_batch(micro_batch), self._valid_micro_batch(previous)
            commands: list[PipeInstruction] = []
            if is_forward:
                if was_here and not self.is_first_stage:
                    commands.append(SendGrad(before))
                if is_here and not self.is_first_stage:
                    commands.append(RecvActivation(buffer))
                if is_here and (self.is_first_stage or self.is_last_stage):
                    commands.append(LoadMicroBatch(buffer))
                if is_here:
                    commands.append(ForwardPass(buffer))
            else:
                if is_here and not self.is_last_stage:
                    commands.append(RecvGrad(buffer))
                if was_here and not self.is_last_stage:
                    commands.append(SendActivation(before))
                if is_here:
                    commands.append(BackwardPass(buffer))
            if step == last:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            previous = micro_batch
            yield commands

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """Returns which micro-batch a step is about (it may not exist), and whether it is a forward."""
        is_forward = (step_id - self.stage_id) % 2 == 0
        start = self.stage_id if is_forward else 2 * self.stages - 1 - self.stage_id
        return (step_id - start) // 2, is_forward


class InferenceSchedule(PipeSchedule):
    """Forwards only; micro-batch i on stage s is step i + s. Even stages send before they receive, odd ones after."""

    def num_pipe_buffers(self) -> int:
        """One is computed on, one sent."""
        return 2

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """``micro_batches + stages - 1`` steps, empty ones among them."""
        for step in range(self.micro_batches + self.stages - 1):
            micro_batch = step - self.stage_id
            buffer, before = self._buffer_idx(micro_batch), self._buffer_idx(micro_batch - 1)
            is_here = self._valid_micro_batch(micro_batch)
            transfers: list[PipeInstruction] = []
            if self._valid_micro_batch(micro_batch - 1) and not self.is_last_stage:
                transfers.append(SendActivation(before))
            if is_here and not self.is_first_stage:
                transfers.append(RecvActivation(buffer))
            if self.stage_id % 2:
                transfers.reverse()
            commands: list[PipeInstruction] = []
            if is_here and (self.is_first_stage or self.is_last_stage):
                commands.append(LoadMicroBatch(buffer))
            commands += transfers
            if is_here:
                commands.append(ForwardPass(buffer))
            yield commands


class DataParallelSchedule(PipeSchedule):
    """Accumulation of gradients without a pipeline."""

    def num_pipe_buffers(self) -> int:
        """One at a time."""
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """One step per micro-batch."""
        for micro_batch in range(self.micro_batches):
            commands: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro_batch == self.micro_batches - 1:
                commands += [ReduceGrads(), OptimizerStep()]
            yield commands
