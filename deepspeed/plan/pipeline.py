"""What a pipeline adds to a plan: which layers a stage holds, in which order it works, and how long it waits.

A stage is rehearsed with the computations that its schedule gives it (``parallel.pipe.schedule``), so the activations
that wait for their backward are really there while later micro-batches go forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.partition import partition_balanced
from deepspeed.parallel.pipe.schedule import TRAIN_SCHEDULES, Schedule, make_schedule
from deepspeed.parallel.pipe.schedule.actions import Kind, held
from deepspeed.parallel.pipe.schedule.simulate import Times, simulate

PLANNED_SCHEDULES = ("1f1b", "gpipe")
"""Those with one chunk per stage and whole backwards; of others only the times are known without the model."""


@dataclass(frozen=True)
class Pipeline:
    """How a model is cut into stages, and in which order they work.

    Attributes:
        stages: Stages.
        schedule: Name of the schedule.
    """

    stages: int = 1
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        if self.schedule not in PLANNED_SCHEDULES:
            known = "is planned with one chunk per stage only" if self.schedule in TRAIN_SCHEDULES else "is not known"
            raise DeepSpeedConfigError(
                f"plan: the schedule {self.schedule!r} {known}; choose one of {', '.join(PLANNED_SCHEDULES)}"
            )

    def of(self, micro_batches: int) -> Schedule:
        """The schedule of a step."""
        return make_schedule(self.schedule, self.stages, micro_batches)

    def enough(self, micro_batches: int) -> int:
        """As many micro-batches as show all that happens in a step: the most in flight, and one after the other."""
        return micro_batches if self.schedule == "gpipe" else min(micro_batches, self.stages + 2)

    def in_flight(self, stage: int, micro_batches: int) -> int:
        """For how many micro-batches a stage keeps activations at once, at most."""
        return max(held(self.of(micro_batches).actions[stage]))


@dataclass(frozen=True)
class Idle:
    """The time of a step in a pipeline, at least.

    Attributes:
        seconds: From the first forward to the last backward, transfers included.
        busy: Of these, what the busiest stage computes.
    """

    seconds: float
    busy: float

    @property
    def share(self) -> float:
        """What the busiest stage waits over what it computes: (p - 1) / m where all stages compute equally long."""
        return self.seconds / self.busy - 1 if self.busy else 0.0


def idle_time(times: Sequence[float], micro_batches: int, transfer: float) -> Idle:
    """How long stages wait for each other.

    One micro-batch passes through all stages and back before the busiest stage is done with the others, whatever the
    order of computations (1F1B, GPipe): sum over stages of (F + B), and m - 1 times that of the busiest.

    Args:
        times: Of each stage, seconds of forward and backward of one micro-batch.
        micro_batches: Of a step.
        transfer: Seconds of the activations of one micro-batch from one stage to the next.
    """
    way = 2 * (len(times) - 1) * transfer
    return Idle(sum(times) + (micro_batches - 1) * max(times) + way, micro_batches * max(times))


def idle_shares(stages: int, micro_batches: int) -> dict[str, float]:
    """By schedule, waiting over computing, if all stages compute equally long: which schedule would pay.

    F : B = 1 : 2, half of the backward for weights; interleaved with two chunks. Found by playing the schedules; those
    that cannot have so few micro-batches are missing.
    """
    found = {}
    for name in TRAIN_SCHEDULES:
        try:
            schedule = make_schedule(name, stages, micro_batches, 1 if name in PLANNED_SCHEDULES + ("zb-h1",) else 2)
        except ValueError:
            continue
        line = simulate(schedule, Times(1.0, 2.0, 1.0))
        found[name] = line.makespan / (3.0 * micro_batches) - 1
    return found


def bounds_of(weights: Sequence[float], stages: int) -> list[int]:
    """Stage i holds the layers from ``bounds[i]`` up to ``bounds[i + 1]``, so that their weights differ little.

    Raises:
        DeepSpeedConfigError: There are fewer layers than stages.
    """
    if len(weights) < stages:
        raise DeepSpeedConfigError(
            f"plan: the model has {len(weights)} layers that can lie on different stages, fewer than the {stages} "
            f"stages; choose at most {len(weights)}"
        )
    return partition_balanced(weights, stages)


def computations(schedule: Schedule, stage: int) -> list[tuple[bool, int]]:
    """Of each computation of a stage, whether it is a forward, and its micro-batch."""
    return [(action.kind is Kind.FORWARD, action.micro_batch) for action in schedule.actions[stage]]
