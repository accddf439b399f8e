"""The schedules of one chunk per stage in their published forms: steps of instructions, seen from one stage."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.parallel.pipe.schedule.lists import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)


class TrainSchedule(PipeSchedule):
    """1F1B: forwards and backwards in turn (Narayanan et al. 2021, "PipeDream-Flush").

    On stage s of p, forward i is step 2 i + s and backward i step 2 i + 2 p - 1 - s. What a step computed is sent at
    the beginning of the next.
    """

    def num_pipe_buffers(self) -> int:
        """Returns the number of stages after this one plus 1, at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields ``2 (micro_batches + stages - 1)`` steps, empty ones among them."""
        last = 2 * (self.micro_batches + self.stages - 1) - 1
        previous = -1
        for step in range(last + 1):
            # The micro-batch that the step is about; it may not exist.
            is_forward = (step - self.stage_id) % 2 == 0
            start = self.stage_id if is_forward else 2 * self.stages - 1 - self.stage_id
            micro_batch = (step - start) // 2
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


class InferenceSchedule(PipeSchedule):
    """Forwards only; micro-batch i on stage s is step i + s. Even stages send before they receive, odd ones after."""

    def num_pipe_buffers(self) -> int:
        """Returns 2: one is computed on, one is sent."""
        return 2

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields ``micro_batches + stages - 1`` steps, empty ones among them."""
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
        """Returns 1."""
        return 1

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields one step per micro-batch."""
        for micro_batch in range(self.micro_batches):
            commands: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro_batch == self.micro_batches - 1:
                commands += [ReduceGrads(), OptimizerStep()]
            yield commands
