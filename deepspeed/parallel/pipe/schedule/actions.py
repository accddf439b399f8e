"""A schedule as plain data: which computations each stage does, in which order.

Words: a *stage* is a place in the pipeline, held by one rank of each model copy; a *chunk* is a run of consecutive
layers, numbered through the model; a stage holds one chunk or several. Transfers, loads of data and everything else
follow from the computations (:mod:`deepspeed.parallel.pipe.schedule.stage`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


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
    """What all stages compute in one step.

    Attributes:
        name: How the program chose it.
        micro_batches: How many micro-batches the step has.
        stage_of: The stage of each chunk.
        actions: Of each stage, its computations in order.
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
        """The chunks that lie on a stage, in the order of the model."""
        return tuple(chunk for chunk, owner in enumerate(self.stage_of) if owner == stage)

    @property
    def is_training(self) -> bool:
        """There are backwards."""
        return any(action.kind is not Kind.FORWARD for actions in self.actions for action in actions)


def held(actions: tuple[Action, ...]) -> list[int]:
    """After each computation, for how many micro-batches (of any chunk) the stage keeps what a forward left."""
    counts, count = [], 0
    for action in actions:
        count += (action.kind is Kind.FORWARD) - action.kind.gives_weight_gradient
        counts.append(count)
    return counts
