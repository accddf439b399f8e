"""Computes the time of a whole step from its simulated micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import override

from deepspeed.parallel.pipe.schedule.lists import Kind as Computation
from deepspeed.parallel.pipe.schedule.simulate import Times, simulate
from deepspeed.plan.machine import Machine
from deepspeed.plan.pipeline import Pipeline, idle_time
from deepspeed.plan.prediction.device_model import DeviceModel
from deepspeed.plan.prediction.network_model import NetworkModel
from deepspeed.plan.prediction.step_times import StepTimes
from deepspeed.plan.timeline.operation_cost import OperationKind
from deepspeed.plan.timeline.predicted_streams import (
    PassTimeline,
    PredictedTimeline,
    StageTimeline,
    flows_between,
    moved,
    place_passes,
)
from deepspeed.plan.timeline.replay import COMPUTE, ReplayRunner, ReplayTimes, SpanFlow, StreamSpan, marked_parts
from deepspeed.plan.timeline.step_trace import TraceEvent


@dataclass(frozen=True)
class TimedStep(StepTimes):
    """The times of a step as they were replayed."""

    copies: float = 0.0  # waits for copies between device and host, in seconds
    files: float = 0.0  # waits for reads and writes of files, in seconds
    spans: list[StreamSpan] = field(default_factory=list)  # the spans of each stream in the simulated micro-batches
    flows: list[SpanFlow] = field(default_factory=list)  # dependencies between these spans

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return super().seconds + self.copies + self.files

    def plus(self, part: ReplayTimes, times: float = 1.0) -> TimedStep:
        """Returns the sum of this and ``times`` times a part of the step."""
        axes = self.exposed.keys() | part.exposed.keys()
        return replace(
            self,
            matmul=self.matmul + times * part.work[OperationKind.MATMUL],
            attention=self.attention + times * part.work[OperationKind.ATTENTION],
            traffic=self.traffic + times * part.work[OperationKind.TRAFFIC],
            exposed={axis: self.exposed.get(axis, 0.0) + times * part.exposed[axis] for axis in axes},
            host=self.host + times * part.host,
            copies=self.copies + times * part.copies,
            files=self.files + times * part.files,
            update=self.update + times * part.update,
        )

    @override
    def rows(self) -> list[tuple[str, float]]:
        *others, bubble, update = super().rows()
        return [*others, ("waits for copies", self.copies), ("waits for files", self.files), bubble, update]

    @override
    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "copy_seconds": self.copies, "file_seconds": self.files}


def _replay(machine: Machine, *, is_asynchronous: bool) -> ReplayRunner:
    return ReplayRunner(DeviceModel(machine.device), NetworkModel(machine), is_asynchronous=is_asynchronous)


def time_step(events: Sequence[TraceEvent], machine: Machine, accumulation: int, *, is_asynchronous: bool) -> TimedStep:
    """Returns the time of a step without stages, from the events of all micro-batches, or of the first and the last."""
    replay = _replay(machine, is_asynchronous=is_asynchronous)
    parts = marked_parts(events)
    simulated = max((mark.micro_batch for mark, _ in parts), default=0) + 1
    whole = replay.run(events)
    found = replace(TimedStep().plus(whole), spans=whole.spans, flows=whole.flows)
    if accumulation > simulated:
        first = [event for mark, part in parts if mark.micro_batch == 0 for event in part]
        found = found.plus(replay.run(first), accumulation - simulated)
    return found


@dataclass(frozen=True)
class PipelineRecording:
    """The events of a pipeline's stages in a step."""

    events: Mapping[int, Sequence[TraceEvent]]  # the events of each simulated stage
    alike: Mapping[int, int]  # by stage, the simulated one with the same layers
    pipeline: Pipeline  # its stages and schedule
    transfer: float  # seconds from the end of a computation until the next stage has its result


class PipelineTimes:
    """Replays each kind of pipeline stage once, for the time and the picture of a step."""

    def __init__(
        self, traces: PipelineRecording, machine: Machine, accumulation: int, *, is_asynchronous: bool
    ) -> None:
        self._traces, self._machine, self._accumulation = traces, machine, accumulation
        self._stages, self._times = _time_stages(traces, machine, accumulation, is_asynchronous=is_asynchronous)
        self._busiest = max(
            self._stages, key=lambda number: self._stages[number].passes.seconds + self._stages[number].tail.seconds
        )

    def step(self) -> TimedStep:
        """Returns the time of the busiest stage and its waits for others, which free processors that are shared."""
        pipeline, processors = self._traces.pipeline, self._machine.processors
        busiest = self._stages[self._busiest]
        idle = idle_time(pipeline, self._times, self._accumulation, processors=processors)
        speed = 1.0
        if processors is not None:
            speed = idle.busy / idle_time(pipeline, self._times, self._accumulation).busy
        found = _scaled(busiest.passes, speed).plus(busiest.tail)
        return replace(found, bubble=max(0.0, idle.seconds - idle.busy))

    def streams(self) -> PredictedTimeline:
        """Returns the streams of the first, the busiest and the last stage, with each pass at its time in the schedule.

        Stages that share processors are drawn as if each had separate ones.
        """
        pipeline, alike, accumulation = self._traces.pipeline, self._traces.alike, self._accumulation
        busiest = min(stage for stage, other in alike.items() if other == self._busiest)
        shown = pipeline.enough(accumulation) if accumulation > _MOST_DRAWN else accumulation
        timeline = simulate(pipeline.of(shown), [self._times[chunk] for chunk in range(len(pipeline.stage_of))])
        ranks: dict[str, list[StreamSpan]] = {}
        stages: dict[str, StageTimeline] = {}
        for number in sorted({0, busiest, pipeline.stages - 1}):
            stage = self._stages[alike[number]]
            own = [chunk for chunk, owner in enumerate(pipeline.stage_of) if owner == number]
            passes = {
                (own[place], kind): stage.streams_of(place, kind) for place in range(len(own)) for kind in Computation
            }
            placed = place_passes(timeline, number, passes)
            late = timeline.makespan + stage.tail.exposed["data"]
            tail = (("waits: data", timeline.makespan, late), ("update", late, late + stage.tail.update))
            spans = placed.spans + [StreamSpan(COMPUTE, name, begin, end) for name, begin, end in tail if end > begin]
            name = f"stage {number}" + (", busiest" if number == busiest else "")
            ranks[name], stages[name] = spans, placed
        return PredictedTimeline(ranks, shown, accumulation, flows_between(stages))


@dataclass(frozen=True)
class _TimedStage:
    """The times of a stage without waits for other stages."""

    passes: TimedStep  # all its passes together
    tail: ReplayTimes  # the end of the step after them
    times: list[Times]  # times of its chunks for one micro-batch
    parts: Mapping[tuple[int, str], ReplayTimes]  # by chunk and phase, one micro-batch

    def streams_of(self, place: int, kind: Computation) -> PassTimeline:
        """Returns the streams in one computation; a whole backward may have been recorded in two halves."""
        chunk = sorted({chunk for chunk, _ in self.parts})[place]
        if kind is Computation.BACKWARD and (chunk, kind.value) not in self.parts:
            first, second = (self.parts.get((chunk, half), ReplayTimes()) for half in "IW")
            later = moved(PassTimeline(second.spans, second.flows), first.seconds)
            return PassTimeline([*first.spans, *later.spans], [*first.flows, *later.flows])
        found = self.parts.get((chunk, kind.value), ReplayTimes())
        return PassTimeline(found.spans, found.flows)


def _time_stages(
    traces: PipelineRecording, machine: Machine, accumulation: int, *, is_asynchronous: bool
) -> tuple[dict[int, _TimedStage], dict[int, Times]]:
    replay = _replay(machine, is_asynchronous=is_asynchronous)
    stages: dict[int, _TimedStage] = {}
    for stage, events in traces.events.items():
        stages[stage] = _time_stage(replay, events, accumulation, traces.transfer)
    times: dict[int, Times] = {}
    for stage, simulated in traces.alike.items():
        own = [chunk for chunk, owner in enumerate(traces.pipeline.stage_of) if owner == stage]
        times |= dict(zip(own, stages[simulated].times, strict=True))
    return stages, times


def _scaled(step: TimedStep, by: float) -> TimedStep:
    return replace(
        step,
        matmul=by * step.matmul,
        attention=by * step.attention,
        traffic=by * step.traffic,
        exposed={axis: by * seconds for axis, seconds in step.exposed.items()},
        host=by * step.host,
        copies=by * step.copies,
        files=by * step.files,
    )


def _time_stage(replay: ReplayRunner, events: Sequence[TraceEvent], accumulation: int, transfer: float) -> _TimedStage:
    marked = [(mark, part) for mark, part in marked_parts(events) if mark.phase in _COMPUTATIONS]
    # The last backward of a chunk also reduces gradients, so the first represents all.
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
    return _TimedStage(total, tail, chunks, parts)


_MOST_DRAWN = 64  # micro-batches; of longer steps fewer are drawn
_COMPUTATIONS = frozenset(kind.value for kind in Computation)
