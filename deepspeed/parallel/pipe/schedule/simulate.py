"""Simulates a schedule: proves that it is free of deadlock, complete and in order, and computes all start times.

The ranks run the very instructions that the engine gets. A receive waits for its message; a send never waits, or, with
bounded channels, waits until the receiver has taken an earlier message.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepspeed.parallel.pipe.schedule.lists import (
    PASSES,
    Action,
    Kind,
    LoadMicroBatch,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    Schedule,
    SendActivation,
    SendGrad,
    StageSchedule,
)

_KINDS: dict[type, Kind] = {instruction: kind for kind, instruction in PASSES.items()}
_GRADIENTS = (SendGrad, RecvGrad)


class ScheduleError(Exception):
    """A schedule that would hang, lose a message or train something else."""


@dataclass(frozen=True)
class Times:
    """Holds the times of one micro-batch on a stage (all of its chunks together) or on one chunk, in any unit."""

    forward: float = 1.0
    backward: float = 2.0  # whole backward
    weight: float = 1.0  # the part of the backward that gives the weights' gradients
    # from the end of a computation until the other stage has the result; the sender is not kept busy
    transfer: float = 0.0

    def of(self, kind: Kind) -> float:
        """Returns the time of one computation."""
        backward_input = self.backward - self.weight
        return {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward, Kind.BACKWARD_INPUT: backward_input}.get(
            kind, self.weight
        )


DEFAULT_TIMES = Times()


class TimedAction(NamedTuple):
    """When a stage did one computation."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A step, computation by computation."""

    spans: tuple[tuple[TimedAction, ...], ...]  # the spans of each stage, in order
    held: tuple[int, ...]  # for each stage, the most activations (of micro-batches and chunks) that it keeps at once

    @property
    def makespan(self) -> float:
        """Time from the common start until the last stage is done."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    def idle(self, stage: int) -> float:
        """Returns the time in which the stage computes nothing."""
        return self.makespan - sum(span.end - span.start for span in self.spans[stage])


def simulate(
    schedule: Schedule, times: Times | Sequence[Times] = DEFAULT_TIMES, *, channel_size: int | None = None
) -> Timeline:
    """Runs all stages from a common start.

    ``times`` are on each stage, or one value per chunk. ``channel_size`` messages of one kind may be in flight from one
    stage to another before the sender waits; None: any number.

    Raises:
        ScheduleError: A stage waits for ever, a message is not the one that is expected, or a computation is missing,
            repeated, misplaced or out of order.
    """
    _check_complete(schedule)
    if isinstance(times, Times):
        share = schedule.stages / schedule.chunks
        one = Times(times.forward * share, times.backward * share, times.weight * share, times.transfer)
        times = [one] * schedule.chunks
    run = _Run(schedule, times, channel_size)
    ranks = [_Rank(stage, run.steps(stage)) for stage in range(schedule.stages)]
    # Ranks are advanced in turn until all wait or are done; only messages carry time from one to another, so the order
    # in which they are advanced changes nothing.
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            moved |= rank.advance()
    stuck = [f"stage {rank.stage} waits for ever: {rank.waits_for}" for rank in ranks if rank.waits_for]
    if stuck:
        raise ScheduleError(f"schedule {schedule.name!r} hangs: " + "; ".join(stuck))
    if left := [key for key, channel in run.channels.items() if channel]:
        raise ScheduleError(f"schedule {schedule.name!r} sends what no stage receives: {left}")
    buffers = (StageSchedule(schedule, stage).num_pipe_buffers() for stage in range(schedule.stages))
    return Timeline(tuple(map(tuple, run.spans)), tuple(buffers))


class _Rank:
    """A stage that runs until it must wait."""

    def __init__(self, stage: int, steps: Iterator[str | None]) -> None:
        self.stage = stage
        self.waits_for: str | None = "its start"
        self._steps = steps

    def advance(self) -> bool:
        """Continues as far as possible; True if it continued at all."""
        moved = False
        for waits_for in self._steps:
            if waits_for is not None:
                self.waits_for = waits_for
                return moved
            moved = True
        moved, self.waits_for = moved or self.waits_for is not None, None
        return moved


class _Run:
    """Tracks the messages between stages in a simulation."""

    def __init__(self, schedule: Schedule, times: Sequence[Times], channel_size: int | None) -> None:
        self.schedule = schedule
        self.spans: list[list[TimedAction]] = [[] for _ in range(schedule.stages)]
        # (sender, receiver, of gradients) -> what was sent and not yet received: (producing chunk, micro-batch), when
        self.channels: defaultdict[tuple[int, int, bool], deque[tuple[int, int, float]]] = defaultdict(deque)
        self._received_at: defaultdict[tuple[int, int, bool], list[float]] = defaultdict(list)
        self._sent: Counter[tuple[int, int, bool]] = Counter()
        self._times = times
        self._size = channel_size

    def steps(self, stage: int) -> Iterator[str | None]:
        """Runs a stage: None after each instruction that is done, a sentence whenever one cannot be done yet."""
        clock, loaded = 0.0, 0
        for instruction in (instruction_ for step in StageSchedule(self.schedule, stage) for instruction_ in step):
            if isinstance(instruction, (RecvActivation, RecvGrad)):
                while (taken := self._receive(stage, instruction, clock)) is None:
                    yield f"{instruction!r}, of which nothing was sent"
                clock = taken
            elif isinstance(instruction, (SendActivation, SendGrad)):
                while (free_from := self._buffer_free_from(stage, instruction)) is None:
                    yield f"{instruction!r}, for which there is no room"
                clock = max(clock, free_from)
                self._send(stage, instruction, clock)
            elif kind := _KINDS.get(type(instruction)):
                action = Action(kind, instruction.chunk, instruction.micro_batch)
                end = clock + self._times[action.chunk].of(kind)
                self.spans[stage].append(TimedAction(action, clock, end))
                clock = end
            elif isinstance(instruction, LoadMicroBatch):
                if instruction.micro_batch != loaded:
                    raise ScheduleError(f"stage {stage} loads {instruction!r} when the data gives item {loaded}")
                loaded += 1
            yield None

    def _receive(self, stage: int, instruction: PipeInstruction, clock: float) -> float | None:
        is_gradient = isinstance(instruction, _GRADIENTS)
        key = (instruction.peer, stage, is_gradient)
        if not self.channels[key]:
            return None
        chunk, micro_batch, arrival = self.channels[key].popleft()
        if (chunk, micro_batch) != (instruction.chunk + (1 if is_gradient else -1), instruction.micro_batch):
            raise ScheduleError(
                f"schedule {self.schedule.name!r}: stage {stage} does {instruction!r} and would receive what chunk "
                f"{chunk} has sent of micro-batch {micro_batch}"
            )
        self._received_at[key].append(max(clock, arrival))
        return self._received_at[key][-1]

    def _buffer_free_from(self, stage: int, instruction: PipeInstruction) -> float | None:
        """Returns when a message can be sent; None: not before the receiver has gone on."""
        key = (stage, instruction.peer, isinstance(instruction, _GRADIENTS))
        # A stage hands its own chunks the tensors themselves.
        before = 0 if self._size is None or stage == instruction.peer else self._sent[key] - self._size + 1
        if before <= 0:
            return 0.0
        return self._received_at[key][before - 1] if len(self._received_at[key]) >= before else None

    def _send(self, stage: int, instruction: PipeInstruction, clock: float) -> None:
        key = (stage, instruction.peer, isinstance(instruction, _GRADIENTS))
        arrival = clock + (self._times[instruction.chunk].transfer if stage != instruction.peer else 0.0)
        self.channels[key].append((instruction.chunk, instruction.micro_batch, arrival))
        self._sent[key] += 1


def _check_complete(schedule: Schedule) -> None:
    """Checks that each chunk meets each micro-batch once per direction, on its stage, in the right order."""
    whole = [[Kind.FORWARD, Kind.BACKWARD], [Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT]]
    wanted = whole if schedule.is_training else [[Kind.FORWARD]]
    for stage, actions in enumerate(schedule.actions):
        done: defaultdict[tuple[int, int], list[Kind]] = defaultdict(list)
        for action in actions:
            done[action.chunk, action.micro_batch].append(action.kind)
        for key in [(chunk, i) for chunk in schedule.chunks_of(stage) for i in range(schedule.micro_batches)]:
            if (kinds := done.pop(key, [])) not in wanted:
                raise ScheduleError(
                    f"schedule {schedule.name!r}: stage {stage} does {[kind.value for kind in kinds]} on chunk "
                    f"{key[0]}, micro-batch {key[1]}; expected is one of "
                    f"{[[kind.value for kind in kinds] for kinds in wanted]}"
                )
        if done:
            raise ScheduleError(f"schedule {schedule.name!r}: stage {stage} computes what is not its own: {[*done]}")
