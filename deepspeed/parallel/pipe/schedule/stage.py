"""The instructions of one stage: the computations of a schedule with all that follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from deepspeed.parallel.pipe.schedule import instructions
from deepspeed.parallel.pipe.schedule.lists import Action, Kind, Schedule, held, make_inference, make_schedule

PASSES: dict[Kind, type[instructions.BufferOpInstruction]] = {
    Kind.FORWARD: instructions.ForwardPass,
    Kind.BACKWARD: instructions.BackwardPass,
    Kind.BACKWARD_INPUT: instructions.BackwardInput,
    Kind.BACKWARD_WEIGHT: instructions.BackwardWeight,
}


class StageSchedule(instructions.PipeSchedule):
    """A schedule as one stage sees it; each computation with its transfers is one step.

    What a computation needs is received right before it and what it gives is sent right after it: the code that runs
    the list may post receives ahead and need not wait for sends. Messages of one kind (activations or gradients)
    between two stages are sent in the order in which they are received.

    Args:
        schedule: The whole schedule.
        stage_id: The stage, from 0.
    """

    def __init__(self, schedule: Schedule, stage_id: int) -> None:
        super().__init__(schedule.micro_batches, schedule.stages, stage_id)
        self.schedule = schedule
        self.chunks = schedule.chunks_of(stage_id)

    def num_pipe_buffers(self) -> int:
        """Returns how many activations (of any chunk) the stage holds at once, at most."""
        if not self.schedule.is_training:
            return 1
        return max(held(self.schedule.actions[self.stage_id]), default=0)

    def steps(self) -> Iterator[list[instructions.PipeInstruction]]:
        """One step per computation; in training one more for the update."""
        actions = self.schedule.actions[self.stage_id]
        first, last = _ends(actions)
        buffers = _Buffers(keep=self.schedule.is_training)
        loaded: set[int] = set()
        for action in actions:
            about = {"buffer_id": buffers.of(action), "micro_batch": action.micro_batch, "chunk": action.chunk}
            marks = {"is_first": action in first, "is_last": action in last}
            step: list[instructions.PipeInstruction] = []
            if self._reads_data(action) and action.micro_batch not in loaded:
                loaded.add(action.micro_batch)
                step.append(instructions.LoadMicroBatch(**about))
            step += self._receives(action, about)
            step.append(PASSES[action.kind](**about, **({} if action.kind is Kind.BACKWARD_INPUT else marks)))
            step += self._sends(action, about)
            yield step
        if self.schedule.is_training:
            yield [instructions.ReduceTiedGrads(), instructions.ReduceGrads(), instructions.OptimizerStep()]

    def _reads_data(self, action: Action) -> bool:
        return action.kind is Kind.FORWARD and action.chunk in (0, self.schedule.chunks - 1)

    def _receives(self, action: Action, about: dict[str, int]) -> list[instructions.PipeInstruction]:
        if action.kind is Kind.FORWARD and action.chunk > 0:
            return [instructions.RecvActivation(**about, peer=self.schedule.stage_of[action.chunk - 1])]
        if action.kind.gives_input_gradient and action.chunk < self.schedule.chunks - 1:
            return [instructions.RecvGrad(**about, peer=self.schedule.stage_of[action.chunk + 1])]
        return []

    def _sends(self, action: Action, about: dict[str, int]) -> list[instructions.PipeInstruction]:
        if action.kind is Kind.FORWARD and action.chunk < self.schedule.chunks - 1:
            return [instructions.SendActivation(**about, peer=self.schedule.stage_of[action.chunk + 1])]
        if action.kind.gives_input_gradient and action.chunk > 0:
            return [instructions.SendGrad(**about, peer=self.schedule.stage_of[action.chunk - 1])]
        return []


@lru_cache(maxsize=16)
def training_steps(
    name: str, stages: int, micro_batches: int, num_chunks: int | None, stage_id: int
) -> tuple[list[instructions.PipeInstruction], ...]:
    """Returns the instructions of a stage for a training step. Arguments as in ``make_schedule``."""
    return tuple(StageSchedule(make_schedule(name, stages, micro_batches, num_chunks), stage_id))


@lru_cache(maxsize=16)
def inference_steps(
    stage_of: tuple[int, ...], micro_batches: int, stage_id: int
) -> tuple[list[instructions.PipeInstruction], ...]:
    """Returns the instructions of a stage for an evaluation. Arguments as in ``make_inference``."""
    return tuple(StageSchedule(make_inference(stage_of, micro_batches), stage_id))


def _ends(actions: tuple[Action, ...]) -> tuple[set[Action], set[Action]]:
    """The first and the last forward of each chunk, and the first and the last computation of its weights' gradient."""
    first: dict[tuple[int, bool], Action] = {}
    last: dict[tuple[int, bool], Action] = {}
    for action in actions:
        if action.kind is not Kind.BACKWARD_INPUT:
            key = (action.chunk, action.kind is Kind.FORWARD)
            first.setdefault(key, action)
            last[key] = action
    return set(first.values()), set(last.values())


class _Buffers:
    """Assigns buffers to micro-batches: the lowest free one, from the forward until the weights' gradient."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._used: dict[tuple[int, int], int] = {}

    def of(self, action: Action) -> int:
        key = (action.chunk, action.micro_batch)
        if not self._keep:
            return 0
        if action.kind is Kind.FORWARD:
            taken = set(self._used.values())
            self._used[key] = next(number for number in range(len(taken) + 1) if number not in taken)
        return self._used.pop(key) if action.kind.gives_weight_gradient else self._used[key]
