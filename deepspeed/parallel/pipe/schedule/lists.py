"""The schedules: which computations each stage does, in which order, and the instructions of a stage that follow.

A *stage* is a place in the pipeline, held by one rank of each model copy. A *chunk* is a run of consecutive layers,
numbered through the model; a stage holds one chunk or several. An *action* is one computation on one chunk and one
micro-batch. :class:`StageSchedule` derives the *instructions* of a stage from the actions: the computations, and their
transfers and loads of data. Instructions have the published names and attributes. ``schedule.chunks`` says which stage
has which chunk.

The functions may continue beyond the last micro-batch: computations on micro-batches that do not exist are left out
afterwards. No computation depends on another micro-batch, so what is left still runs, and no schedule needs a case for
few of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from deepspeed.parallel.partition import partition_uniform
from deepspeed.parallel.pipe.schedule.chunks import dualpipev, place_chunks, zbv


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
    """Lists the computations of all stages in one step."""

    name: str  # how the program chose it
    micro_batches: int  # how many micro-batches the step has
    stage_of: tuple[int, ...]  # the stage of each chunk
    actions: tuple[tuple[Action, ...], ...]  # the computations of each stage, in order

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


def gpipe(stage: int, stages: int, micro_batches: int, chunks: int) -> list[Action]:
    """Returns all forwards, then all backwards (Huang et al. 2019)."""
    return [Action(kind, stage, i) for kind in (Kind.FORWARD, Kind.BACKWARD) for i in range(micro_batches)]


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

    Groups of micro-batches, of the sizes ``forward_groups``, go through one chunk of the stage after the other, and
    come back in ``backward_groups``.

    Args:
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


def _in_v(
    order: Callable[[int, int, int], list[tuple[str, int, int]]], stage: int, stages: int, micro_batches: int, _: int
) -> list[Action]:
    return [Action(Kind(letter), chunk, i) for letter, chunk, i in order(stage, stages, micro_batches)]


_LISTS: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zbv": partial(_in_v, zbv),
    "dualpipev": partial(_in_v, dualpipev),
}


@lru_cache(maxsize=16)
def make_schedule(name: str, stages: int, micro_batches: int, num_chunks: int | None = None) -> Schedule:
    """Returns what all stages compute in a training step of one or more micro-batches.

    ``num_chunks`` is per stage; None: as few as the schedule can have.

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

    A stage works on what has come farthest, so that little is in flight. There may be no micro-batch.
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


class PipeInstruction:
    """One instruction; its keyword arguments are also its attributes.

    Two are equal if they are of one class with equal arguments.
    """

    words = ""  # what the class of instructions does, for messages

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

    Those of a :class:`StageSchedule` carry all of these, those of the published schedules ``buffer_id`` only.

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
    """The instructions of one stage (from 0) for one step; iterating gives them in lists, which are called steps.

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
        actions, stage_of = self.schedule.actions[self.stage_id], self.schedule.stage_of
        first, last = _ends(actions)
        buffers = _Buffers(keep=self.schedule.is_training)
        loaded: set[int] = set()
        for action in actions:
            kind, chunk = action.kind, action.chunk
            about = {"buffer_id": buffers.of(action), "micro_batch": action.micro_batch, "chunk": chunk}
            marks = {"is_first": action in first, "is_last": action in last}
            has_before, has_after = chunk > 0, chunk < self.schedule.chunks - 1
            step: list[PipeInstruction] = []
            if kind is Kind.FORWARD and not (has_before and has_after) and action.micro_batch not in loaded:
                loaded.add(action.micro_batch)
                step.append(LoadMicroBatch(**about))
            if kind is Kind.FORWARD and has_before:
                step.append(RecvActivation(**about, peer=stage_of[chunk - 1]))
            elif kind.gives_input_gradient and has_after:
                step.append(RecvGrad(**about, peer=stage_of[chunk + 1]))
            step.append(PASSES[kind](**about, **({} if kind is Kind.BACKWARD_INPUT else marks)))
            if kind is Kind.FORWARD and has_after:
                step.append(SendActivation(**about, peer=stage_of[chunk + 1]))
            elif kind.gives_input_gradient and has_before:
                step.append(SendGrad(**about, peer=stage_of[chunk - 1]))
            yield step
        if self.schedule.is_training:
            yield [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


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
