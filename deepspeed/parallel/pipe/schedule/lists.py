"""The schedules: which computations each stage does, in which order, and the instructions of a stage that follow.

A *stage* is a place in the pipeline, held by one rank of each model copy. A *chunk* is a run of consecutive layers,
numbered through the model; a stage holds one chunk or several. An *action* is one computation on one chunk and one
micro-batch. :class:`StageSchedule` derives transfers and loads of data from the actions.

The functions may continue beyond the last micro-batch: computations on micro-batches that do not exist are left out
afterwards. No computation depends on another micro-batch, so what is left still runs, and no schedule needs a case for
few of them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from deepspeed.parallel.partition import partition_uniform
from deepspeed.parallel.pipe.schedule.instructions import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
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


class Kind(Enum):
    """A computation on one chunk and one micro-batch; the values are the letters of the literature."""

    FORWARD = "F"
    BACKWARD = "B"  # of inputs and weights
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    @property
    def gives_input_gradient(self) -> bool:
        """The previous chunk's backward waits for this."""
        return self in (Kind.BACKWARD, Kind.BACKWARD_INPUT)

    @property
    def gives_weight_gradient(self) -> bool:
        """This is also the last computation that needs what the forward kept."""
        return self in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)


class Action(NamedTuple):
    """One computation."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """Lists the computations of all stages in one step.

    Attributes:
        name: How the program chose it.
        micro_batches: How many micro-batches the step has.
        stage_of: The stage of each chunk.
        actions: The computations of each stage, in order.
    """

    name: str
    micro_batches: int
    stage_of: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.actions)

    @property
    def chunks(self) -> int:
        """Number of chunks of the model."""
        return len(self.stage_of)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Returns the chunks that lie on a stage, in the order of the model."""
        return tuple(chunk for chunk, owner in enumerate(self.stage_of) if owner == stage)

    @property
    def is_training(self) -> bool:
        """There are backwards."""
        return any(action.kind is not Kind.FORWARD for actions in self.actions for action in actions)


def held(actions: tuple[Action, ...]) -> list[int]:
    """Returns, after each computation, for how many micro-batches (of any chunk) the stage keeps forward results."""
    counts, count = [], 0
    for action in actions:
        count += (action.kind is Kind.FORWARD) - action.kind.gives_weight_gradient
        counts.append(count)
    return counts


class _Stage(list[Action]):
    """The computations of one stage; each call appends the next micro-batch's."""

    def __init__(self) -> None:
        super().__init__()
        self._done: Counter[tuple[bool, int]] = Counter()
        self._weights: deque[tuple[int, int]] = deque()

    def forward(self, chunk: int) -> None:
        self.append(Action(Kind.FORWARD, chunk, self._next(True, chunk)))

    def backward(self, chunk: int) -> None:
        self.append(Action(Kind.BACKWARD, chunk, self._next(False, chunk)))

    def backward_input(self, chunk: int) -> None:
        micro_batch = self._next(False, chunk)
        self.append(Action(Kind.BACKWARD_INPUT, chunk, micro_batch))
        self._weights.append((chunk, micro_batch))

    def weight(self) -> None:
        """The weights' part of the longest waiting backward."""
        self.append(Action(Kind.BACKWARD_WEIGHT, *self._weights.popleft()))

    def remaining_weights(self) -> None:
        while self._weights:
            self.weight()

    def _next(self, is_forward: bool, chunk: int) -> int:
        self._done[is_forward, chunk] += 1
        return self._done[is_forward, chunk] - 1


def gpipe(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Returns all forwards, then all backwards (Huang et al. 2019)."""
    actions = _Stage()
    for _ in range(micro_batches):
        actions.forward(stage)
    for _ in range(micro_batches):
        actions.backward(stage)
    return actions


def one_f_one_b(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Returns a forward and a backward in turn, as soon as backwards come (Narayanan et al. 2021).

    All stages but the last are one forward further ahead than published. So what a stage waits for is in flight while
    it computes something else, and transfers cost time when the pipeline fills and drains, not for every micro-batch.
    """
    groups = _sizes(micro_batches, stages)
    return _in_turn(stage, stages, chunks, groups, groups, ahead=stages - 1 - stage + (stage < stages - 1))


def interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Returns 1F1B in which stage s also holds chunks s + p, s + 2 p, ... (Narayanan et al. 2021).

    Published are groups of p micro-batches, which cost extra where p does not divide m; groups of about equal size,
    none below p, reach (p - 1) (F + B) / v idle time for every m >= p.

    The last stage waits for p transfers when a group comes round, unless the group is larger than p. Two groups, of
    which the first goes forward and the last backward with p + 1, wait for none and keep less, as stages need not be as
    far ahead of each other. (With a third group they would; where B > 3 F they idle up to 1 % longer.)
    """
    after = stages - 1 - stage
    if stages > 3 and 2 * stages <= micro_batches <= 2 * stages + 1:
        two = (stages + 1, micro_batches - stages - 1)
        return _in_turn(stage, stages, chunks, two, two[::-1], ahead=after + (after > 0))
    groups = _sizes(micro_batches, stages)
    return _in_turn(stage, stages, chunks, groups, groups, ahead=2 * after)


def zb_h1(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Returns 1F1B with split backwards. Weights are computed s backwards late, which fills the bubble at the end.

    Idle are (p - 1) (F + B - 2 W) / v; no stage holds more than the first of 1F1B, for m >= p divided by p (Qi et al.
    2023, who have one chunk per stage).
    """
    groups = _sizes(micro_batches, stages)
    return _in_turn(stage, stages, chunks, groups, groups, ahead=stages - 1 - stage, weights_late=stage)


def _sizes(micro_batches: int, stages: int) -> tuple[int, ...]:
    """Returns the groups of about equal size, none below that of the stages unless there are fewer micro-batches."""
    bounds = partition_uniform(micro_batches, max(1, micro_batches // stages))
    return tuple(end - start for start, end in pairwise(bounds))


def _in_turn(
    stage: int,
    stages: int,
    chunks: int,
    forward_groups: Sequence[int],
    backward_groups: Sequence[int],
    *,
    ahead: int,
    weights_late: int | None = None,
) -> list[Action]:
    """Returns a forward and a backward in turn.

    Groups of micro-batches go through one chunk of the stage after the other.

    Args:
        forward_groups: Their sizes.
        backward_groups: Those in which they come back.
        ahead: Forwards before the first backward, beside those that let the first group reach the last chunk.
        weights_late: How many backwards wait for their weights' part; None: backwards are not split.
    """
    own = range(stage, stages * chunks, stages)
    forwards = [Action(Kind.FORWARD, chunk, i) for group in _ranges(forward_groups) for chunk in own for i in group]
    backwards = [(chunk, i) for group in _ranges(backward_groups) for chunk in reversed(own) for i in group]
    ahead += (chunks - 1) * forward_groups[0]
    actions = forwards[:ahead]
    weights: deque[Action] = deque()
    for number, (chunk, i) in enumerate(backwards):
        actions += forwards[ahead + number : ahead + number + 1]
        if weights_late is None:
            actions.append(Action(Kind.BACKWARD, chunk, i))
            continue
        actions.append(Action(Kind.BACKWARD_INPUT, chunk, i))
        weights.append(Action(Kind.BACKWARD_WEIGHT, chunk, i))
        if number >= weights_late:
            actions.append(weights.popleft())
    return actions + [*weights]


def _ranges(sizes: Sequence[int]) -> list[range]:
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def zbv(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Returns split backwards on two chunks per stage, placed in a V, so that the first stage also computes the loss.

    Each stage works without a gap from its first forward on if F = B / 2 = W, and holds 2 p chunk activations, as
    much as the first stage of 1F1B (Qi et al. 2024).
    """
    down, up = stage, 2 * stages - 1 - stage
    after, total = stages - stage, max(micro_batches, 2 * stages)
    actions = _Stage()
    for _ in range(2 * after - 1):
        actions.forward(down)
    for _ in range(stage):
        actions.forward(up)
        actions.forward(down)
    for _ in range(after):
        actions.forward(up)
        actions.backward_input(up)
        actions.weight()
    for _ in range(total - stages):
        actions.forward(down)
        actions.backward_input(down)
        actions.weight()
        actions.forward(up)
        actions.backward_input(up)
        actions.weight()
    for _ in range(stage):
        actions.backward_input(down)
        actions.backward_input(up)
    for _ in range(after):
        actions.backward_input(down)
        actions.weight()
    actions.remaining_weights()
    return actions


def dualpipev(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Returns the V of ZBV with pairs of a forward and a whole backward, which may overlap (DeepSeek-AI 2025).

    Only the backwards at the end are split.
    """
    down, up = stage, 2 * stages - 1 - stage
    after, total = stages - 1 - stage, max(micro_batches, 2 * stages)
    actions = _Stage()
    for _ in range(2 * after):
        actions.forward(down)
    for _ in range(stage + 1):
        actions.forward(down)
        actions.forward(up)
    for _ in range(after):
        actions.backward_input(up)
        actions.weight()
        actions.forward(up)
    for _ in range(total - 2 * stages + stage + 1):
        actions.forward(down)
        actions.backward(up)
        actions.forward(up)
        actions.backward(down)
    for _ in range(after):
        actions.backward(up)
        actions.forward(up)
        actions.backward(down)
    # The weights of the last stage + 1 backwards wait for the gaps that follow.
    for number in range(2 * (stage + 1)):
        chunk = down if number % 2 else up
        if number > stage:
            actions.backward_input(chunk)
        else:
            actions.backward(chunk)
    for _ in range(after):
        actions.weight()
        actions.backward_input(down)
    actions.remaining_weights()
    return actions


_LISTS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zbv": zbv,
    "dualpipev": dualpipev,
}
# What ``PipelineModule(schedule=...)`` and ``pipeline.schedule`` accept.
TRAIN_SCHEDULES = tuple(_LISTS)
_VEES = ("zbv", "dualpipev")


def place_chunks(name: str, stages: int, num_chunks: int | None = None) -> tuple[int, ...]:
    """Returns the stage of each chunk of the model, in order.

    Args:
        name: One of :data:`TRAIN_SCHEDULES`.
        stages: Stages of the pipeline.
        num_chunks: Chunks per stage; None: as few as the schedule can have.

    Raises:
        ValueError: The schedule does not exist or cannot have this many chunks.
    """
    if name not in _LISTS:
        raise ValueError(f"schedule={name!r} is not known; choose one of {', '.join(map(repr, TRAIN_SCHEDULES))}")
    if stages < 1:
        raise ValueError(f"a pipeline of {stages} stages is not possible; give it one stage or more")
    if name in _VEES:
        if num_chunks not in (None, 2):
            raise ValueError(
                f"schedule={name!r} lays two chunks per stage in a V, so num_chunks={num_chunks} is not possible; "
                "leave num_chunks out, or choose schedule='interleaved', which takes any number from 2"
            )
        return (*range(stages), *reversed(range(stages)))
    if name == "interleaved":
        if num_chunks is not None and num_chunks < 2:
            raise ValueError(
                f"num_chunks={num_chunks} with schedule='interleaved': expected 2 chunks per stage or more. Raise "
                "num_chunks, or choose schedule='1f1b', which has one"
            )
        return tuple(range(stages)) * (num_chunks or 2)
    if name == "zb-h1" and num_chunks is not None and num_chunks > 1:
        return tuple(range(stages)) * num_chunks
    if num_chunks not in (None, 1):
        raise ValueError(
            f"schedule={name!r} has one chunk per stage and num_chunks is {num_chunks}; leave num_chunks out, or "
            "choose schedule='interleaved'"
        )
    return tuple(range(stages))


@lru_cache(maxsize=16)
def make_schedule(name: str, stages: int, micro_batches: int, num_chunks: int | None = None) -> Schedule:
    """Returns what all stages compute in a training step.

    Args:
        name: The name of the schedule.
        stages: Pipeline stages.
        micro_batches: Micro-batches of a step, 1 or more.
        num_chunks: Chunks per stage; None: as few as the schedule can have.

    Raises:
        ValueError: The schedule is unknown, does not go with these numbers, or there is no micro-batch.
    """
    stage_of = place_chunks(name, stages, num_chunks)
    if micro_batches < 1:
        raise ValueError(f"a step of {micro_batches} micro-batches is not possible; it needs one or more")
    chunks = len(stage_of) // stages
    lists = [_LISTS[name](stage, stages, micro_batches, chunks) for stage in range(stages)]
    return Schedule(
        name,
        micro_batches,
        stage_of,
        tuple(tuple(action for action in actions if action.micro_batch < micro_batches) for actions in lists),
    )


@lru_cache
def splits_backward(name: str) -> bool:
    """Returns whether a schedule computes the gradients of inputs and those of weights apart."""
    lists = make_schedule(name, 2, 4).actions
    return any(action.kind is Kind.BACKWARD_INPUT for actions in lists for action in actions)


def make_inference(stage_of: tuple[int, ...], micro_batches: int) -> Schedule:
    """Forwards only, with the chunks where training has them.

    A stage works on what has come farthest, so that little is in flight.

    Args:
        stage_of: The stage of each chunk.
        micro_batches: How many micro-batches are evaluated; 0 will do.
    """
    stages = max(stage_of) + 1
    waiting = [[Action(Kind.FORWARD, chunk, i) for chunk in range(len(stage_of))] for i in range(micro_batches)]
    lists: list[list[Action]] = [[] for _ in range(stages)]
    while any(waiting):
        # One tick: each stage takes one micro-batch one chunk further; those in front go first.
        busy: set[int] = set()
        for chain in waiting:
            if chain and (stage := stage_of[chain[0].chunk]) not in busy:
                busy.add(stage)
                lists[stage].append(chain.pop(0))
    return Schedule("inference", micro_batches, stage_of, tuple(map(tuple, lists)))


# -- the instructions of one stage -------------------------------------------------------------------------------------

PASSES: dict[Kind, type[BufferOpInstruction]] = {
    Kind.FORWARD: ForwardPass,
    Kind.BACKWARD: BackwardPass,
    Kind.BACKWARD_INPUT: BackwardInput,
    Kind.BACKWARD_WEIGHT: BackwardWeight,
}


class StageSchedule(PipeSchedule):
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

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields one step per computation; in training one more for the update."""
        actions = self.schedule.actions[self.stage_id]
        first, last = _ends(actions)
        buffers = _Buffers(keep=self.schedule.is_training)
        loaded: set[int] = set()
        for action in actions:
            about = {"buffer_id": buffers.of(action), "micro_batch": action.micro_batch, "chunk": action.chunk}
            marks = {"is_first": action in first, "is_last": action in last}
            step: list[PipeInstruction] = []
            if self._reads_data(action) and action.micro_batch not in loaded:
                loaded.add(action.micro_batch)
                step.append(LoadMicroBatch(**about))
            step += self._receives(action, about)
            step.append(PASSES[action.kind](**about, **({} if action.kind is Kind.BACKWARD_INPUT else marks)))
            step += self._sends(action, about)
            yield step
        if self.schedule.is_training:
            yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]

    def _reads_data(self, action: Action) -> bool:
        return action.kind is Kind.FORWARD and action.chunk in (0, self.schedule.chunks - 1)

    def _receives(self, action: Action, about: dict[str, int]) -> list[PipeInstruction]:
        if action.kind is Kind.FORWARD and action.chunk > 0:
            return [RecvActivation(**about, peer=self.schedule.stage_of[action.chunk - 1])]
        if action.kind.gives_input_gradient and action.chunk < self.schedule.chunks - 1:
            return [RecvGrad(**about, peer=self.schedule.stage_of[action.chunk + 1])]
        return []

    def _sends(self, action: Action, about: dict[str, int]) -> list[PipeInstruction]:
        if action.kind is Kind.FORWARD and action.chunk < self.schedule.chunks - 1:
            return [SendActivation(**about, peer=self.schedule.stage_of[action.chunk + 1])]
        if action.kind.gives_input_gradient and action.chunk > 0:
            return [SendGrad(**about, peer=self.schedule.stage_of[action.chunk - 1])]
        return []


@lru_cache(maxsize=16)
def training_steps(
    name: str, stages: int, micro_batches: int, num_chunks: int | None, stage_id: int
) -> tuple[list[PipeInstruction], ...]:
    """Returns the instructions of a stage for a training step. Arguments as in ``make_schedule``."""
    return tuple(StageSchedule(make_schedule(name, stages, micro_batches, num_chunks), stage_id))


@lru_cache(maxsize=16)
def inference_steps(stage_of: tuple[int, ...], micro_batches: int, stage_id: int) -> tuple[list[PipeInstruction], ...]:
    """Returns the instructions of a stage for an evaluation. Arguments as in ``make_inference``."""
    return tuple(StageSchedule(make_inference(stage_of, micro_batches), stage_id))


def _ends(actions: tuple[Action, ...]) -> tuple[set[Action], set[Action]]:
    """Returns the first actions, and the last ones, of each chunk: of its forwards and of its weight backwards."""
    first: dict[tuple[int, bool], Action] = {}
    last: dict[tuple[int, bool], Action] = {}
    for action in actions:
        if action.kind is not Kind.BACKWARD_INPUT:
            key = (action.chunk, action.kind is Kind.FORWARD)
            first.setdefault(key, action)
            last[key] = action
    return set(first.values()), set(last.values())


class _Buffers:
    """Assigns each micro-batch the free buffer of the lowest number, from its forward until its weight backward."""

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
