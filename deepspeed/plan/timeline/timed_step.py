"""The time of a whole step from what was simulated of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from deepspeed.parallel.pipe.schedule.lists import Kind as Computation
from deepspeed.parallel.pipe.schedule.simulate import Times
from deepspeed.plan.machine import Machine
from deepspeed.plan.pipeline import Pipeline, idle_time
from deepspeed.plan.prediction.device_model import DeviceModel
from deepspeed.plan.prediction.network_model import NetworkModel
from deepspeed.plan.prediction.step_times import StepTimes
from deepspeed.plan.timeline.operation_cost import OperationKind
from deepspeed.plan.timeline.replay import ReplayRunner, ReplayTimes, StreamSpan, segments
from deepspeed.plan.timeline.step_trace import TraceEvent


@dataclass(frozen=True)
class TimedStep(StepTimes):
    """The times of a step as they were replayed.

    Attributes:
        copies: Waits for copies between device and host, in seconds.
        spans: What each stream does in the micro-batches that were simulated.
    """

    copies: float = 0.0
    spans: list[StreamSpan] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return super().seconds + self.copies

    def plus(self, part: ReplayTimes, times: float = 1.0) -> TimedStep:
        """Returns this and ``times`` a part of the step."""
        axes = self.exposed.keys() | part.exposed.keys()
        return replace(
            self,
            matmul=self.matmul + times * part.work[OperationKind.MATMUL],
            attention=self.attention + times * part.work[OperationKind.ATTENTION],
            traffic=self.traffic + times * part.work[OperationKind.TRAFFIC],
            exposed={axis: self.exposed.get(axis, 0.0) + times * part.exposed[axis] for axis in axes},
            host=self.host + times * part.host,
            copies=self.copies + times * part.copies,
            update=self.update + times * part.update,
        )

    @override
    def rows(self) -> list[tuple[str, float]]:
        *others, bubble, update = super().rows()
        return [*others, ("waits for copies", self.copies), bubble, update]

    @override
    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "copy_seconds": self.copies}


def _replay(machine: Machine, *, is_asynchronous: bool) -> ReplayRunner:
    return ReplayRunner(DeviceModel(machine.device), NetworkModel(machine), is_asynchronous=is_asynchronous)


def time_step(events: Sequence[TraceEvent], machine: Machine, accumulation: int, *, is_asynchronous: bool) -> TimedStep:
    """Returns the time of a step without stages.

    Args:
        events: Of the micro-batches that were simulated: all, or the first and the last.
        machine: On which they run.
        accumulation: Micro-batches of the step.
        is_asynchronous: The device works beside the host.
    """
    replay = _replay(machine, is_asynchronous=is_asynchronous)
    parts = segments(events)
    simulated = max((mark.micro_batch for mark, _ in parts), default=0) + 1
    whole = replay.run(events)
    found = replace(TimedStep().plus(whole), spans=whole.spans)
    if accumulation > simulated:
        first = [event for mark, part in parts if mark.micro_batch == 0 for event in part]
        found = found.plus(replay.run(first), accumulation - simulated)
    return found


@dataclass(frozen=True)
class PipelineRecording:
    """What the stages of a pipeline issue in a step.

    Attributes:
        events: By stage that was simulated, what it issued.
        alike: By stage, the simulated one with the same layers.
        pipeline: Its stages and schedule.
        transfer: Seconds from the end of a computation until the next stage has its result.
    """

    events: Mapping[int, Sequence[TraceEvent]]
    alike: Mapping[int, int]
    pipeline: Pipeline
    transfer: float


def time_pipeline(
    traces: PipelineRecording, machine: Machine, accumulation: int, *, is_asynchronous: bool
) -> TimedStep:
    """Returns the time of a step of a pipeline: that of its busiest stage, and its waits for the others.

    Where ranks share processors, a stage computes faster while others wait.

    Args:
        traces: Of its stages.
        machine: On which they run.
        accumulation: Micro-batches of the step.
        is_asynchronous: The device works beside the host.
    """
    replay = _replay(machine, is_asynchronous=is_asynchronous)
    stages: dict[int, _TimedStage] = {}
    for stage, events in traces.events.items():
        stages[stage] = _time_stage(replay, events, accumulation, traces.transfer)
    times: dict[int, Times] = {}
    for stage, simulated in traces.alike.items():
        own = [chunk for chunk, owner in enumerate(traces.pipeline.stage_of) if owner == stage]
        times |= dict(zip(own, stages[simulated].times, strict=True))
    busiest = max(stages.values(), key=lambda stage: stage.passes.seconds + stage.tail.seconds)
    idle = idle_time(traces.pipeline, times, accumulation, processors=machine.processors)
    speed = 1.0
    if machine.processors is not None:
        speed = idle.busy / idle_time(traces.pipeline, times, accumulation).busy
    found = _scaled(busiest.passes, speed).plus(busiest.tail)
    return replace(found, bubble=max(0.0, idle.seconds - idle.busy), spans=busiest.spans)


@dataclass(frozen=True)
class _TimedStage:
    """A stage that never waits for others: its passes, what comes after them, and its chunks for one micro-batch."""

    passes: TimedStep
    tail: ReplayTimes
    times: list[Times]
    spans: list[StreamSpan]


def _scaled(step: TimedStep, by: float) -> TimedStep:
    return replace(
        step,
        matmul=by * step.matmul,
        attention=by * step.attention,
        traffic=by * step.traffic,
        exposed={axis: by * seconds for axis, seconds in step.exposed.items()},
        host=by * step.host,
        copies=by * step.copies,
    )


def _time_stage(replay: ReplayRunner, events: Sequence[TraceEvent], accumulation: int, transfer: float) -> _TimedStage:
    marked = [(mark, part) for mark, part in segments(events) if mark.phase in _COMPUTATIONS]
    # The last backward of a chunk also sums gradients, so the first stands for all.
    first = {(mark.chunk, mark.phase): part for mark, part in reversed(marked)}
    parts = {key: replay.run(part) for key, part in first.items()}
    total = TimedStep()
    for part in parts.values():
        total = total.plus(part, accumulation)
    whole = replay.run(events)
    alone = sum(parts[mark.chunk, mark.phase].seconds for mark, _ in marked)
    late = max(0.0, whole.seconds - alone - whole.update)
    tail = ReplayTimes(update=whole.update, seconds=whole.update + late)
    tail.exposed["data"] = late
    chunks = []
    for chunk in sorted({chunk for chunk, _ in parts}):
        seconds = {phase: part.seconds for (own, phase), part in parts.items() if own == chunk}
        split = seconds.get("I", 0.0) + seconds.get("W", 0.0)
        chunks.append(Times(seconds["F"], seconds.get("B", split), seconds.get("W", 0.0), transfer))
    return _TimedStage(total, tail, chunks, whole.spans)


_COMPUTATIONS = frozenset(kind.value for kind in Computation)
