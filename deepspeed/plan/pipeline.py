"""Pipelines in a plan: which layers a stage has, its schedule, and how long it is idle.

A stage is simulated with the computations that its schedule gives it (``parallel.pipe.schedule``), so activations
of micro-batches in flight are held as in training.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.pipe.module import DEFAULT_SCHEDULE
from deepspeed.parallel.pipe.partition import chunk_bounds
from deepspeed.parallel.pipe.schedule import TRAIN_SCHEDULES, Schedule, make_schedule, place_chunks
from deepspeed.parallel.pipe.schedule.lists import Kind, held
from deepspeed.parallel.pipe.schedule.simulate import Times, simulate
from deepspeed.parallel.pipe.spec import Entry, LayerSpec, TiedLayerSpec, class_name, trainable_numel

_NUMBERS = ("number", "layer_idx", "layer_id", "layer_number")  # by which equal layers are recognized


@dataclass(frozen=True)
class Pipeline:
    """Describes a model's cut into stages, and their schedule."""

    stages: int = 1
    schedule: str = "1f1b"  # name of the schedule
    num_chunks: int | None = None  # chunks per stage; None: as few as the schedule allows

    def __post_init__(self) -> None:
        try:
            place_chunks(self.schedule, self.stages, self.num_chunks)
        except ValueError as error:
            raise DeepSpeedConfigError(f"plan: {error}") from None

    @property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each chunk."""
        return place_chunks(self.schedule, self.stages, self.num_chunks)

    @property
    def group(self) -> int:
        """Consecutive micro-batches in a chunk before the stage's next chunk begins."""
        is_vee = self.stage_of[:1] == self.stage_of[-1:]
        return self.stages if len(self.stage_of) > self.stages and not is_vee else 1

    def of(self, micro_batches: int) -> Schedule:
        """Returns the schedule of a step."""
        return make_schedule(self.schedule, self.stages, micro_batches, self.num_chunks)

    def enough(self, micro_batches: int) -> int:
        """Returns how many micro-batches must be simulated to represent a step."""
        most = [self.in_flight(stage, micro_batches) for stage in range(self.stages)]
        least = max(3 * self.group, self.stages + 2)
        for number in range(micro_batches % self.group, micro_batches, self.group):
            if number >= least and [self.in_flight(stage, number) for stage in range(self.stages)] == most:
                return number
        return micro_batches

    def in_flight(self, stage: int, micro_batches: int) -> int:
        """Returns the most micro-batches (of any of its chunks) whose activations a stage keeps at once."""
        return _in_flight(self, micro_batches)[stage]


@functools.lru_cache(maxsize=256)
def _in_flight(pipeline: Pipeline, micro_batches: int) -> tuple[int, ...]:
    """Returns by stage for how many micro-batches it keeps activations. Cached, as many stages take seconds."""
    return tuple(max(held(actions)) for actions in pipeline.of(micro_batches).actions)


def pipeline_of(
    config: Mapping[str, Any], stages: int = 1, schedule: str | None = None, num_chunks: int | None = None
) -> Pipeline:
    """Returns the requested pipeline; what is None comes from ``config``, else from ``PipelineModule``'s defaults."""
    section = config.get("pipeline") or {}
    chunks = num_chunks or (section.get("num_chunks") if schedule is None else None)
    return Pipeline(stages, schedule or section.get("schedule") or DEFAULT_SCHEDULE, chunks)


@dataclass(frozen=True)
class PlannedCut:
    """The layers of a model, divided among the chunks of a pipeline."""

    bounds: tuple[int, ...]  # chunk i has the layers from ``bounds[i]`` up to ``bounds[i + 1]``
    contents: tuple[Any, ...]  # content of each chunk; chunks with equal contents compute the same


def cut_of(layers: Sequence[Entry], pipeline: Pipeline) -> PlannedCut:
    """Cuts layers into chunks of equally many trained elements; raises DeepSpeedConfigError where there are too few."""
    parts = len(pipeline.stage_of)
    if len(layers) < parts:
        chunks = "" if parts == pipeline.stages else f" of {parts // pipeline.stages} chunks each"
        raise DeepSpeedConfigError(
            f"plan: the model has {len(layers)} layers that can lie on different stages, fewer than the "
            f"{pipeline.stages} stages{chunks} need; choose at most {len(layers) * pipeline.stages // parts} stages"
        )
    names = [class_name(entry) for entry in layers]
    bounds = chunk_bounds("parameters", [trainable_numel(entry) for entry in layers], names, parts)
    whats = [_content_of(entry) for entry in layers]
    return PlannedCut(tuple(bounds), tuple(tuple(whats[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)))


def _content_of(entry: Entry) -> Any:
    """Returns the identity of a layer, without its place in the pipeline."""
    module: Any = entry.build() if isinstance(entry, LayerSpec) else entry
    way = getattr(entry, "forward_fn", None) is None if isinstance(entry, TiedLayerSpec) else None
    if not isinstance(module, nn.Module):
        return class_name(entry)
    plain = [
        (name, value)
        for inner in module.modules()
        for name, value in vars(inner).items()
        if isinstance(value, (bool, int, float, str)) and name not in _NUMBERS
    ]
    return way, str(module), plain


@dataclass(frozen=True)
class PipelineBubble:
    """Lower bound of the time of a step in a pipeline."""

    seconds: float  # from the first forward to the last backward, transfers included
    busy: float  # seconds of them in which the busiest stage computes

    @property
    def share(self) -> float:
        """Waiting over computing time of the busiest stage: (p - 1) / m where all stages compute equally long."""
        return self.seconds / self.busy - 1 if self.busy else 0.0


_SHORTEST = 1e-9  # seconds of a computation, so that each has an end
_MOST_SIMULATED = 8  # groups of micro-batches per stage: longer steps are like them with more in the middle


def idle_time(
    pipeline: Pipeline, times: Mapping[int, Times], micro_batches: int, *, processors: float | None = None
) -> PipelineBubble:
    """Returns how long stages wait for each other, from a simulation of the schedule.

    Args:
        times: Seconds of each chunk for one micro-batch; with ``processors``, while all stages compute.
        processors: How many stages can compute at once without slowing each other; None: all.
    """
    chunks = [times[chunk] for chunk in range(len(pipeline.stage_of))]
    if processors is not None:
        return simulate_shared(pipeline.of(micro_batches), chunks, processors)
    busy = [0.0] * pipeline.stages
    for stage, each in zip(pipeline.stage_of, chunks, strict=True):
        busy[stage] += each.forward + each.backward
    step = pipeline.stages
    left_out = max(0, micro_batches - _MOST_SIMULATED * step) // step * step
    simulated = micro_batches - left_out
    seconds = simulate(pipeline.of(simulated), chunks).makespan
    if left_out:
        before = simulate(pipeline.of(simulated - step), chunks).makespan
        seconds += (seconds - before) * (left_out // step)
    return PipelineBubble(seconds, micro_batches * max(busy))


def simulate_shared(schedule: Schedule, times: Sequence[Times], processors: float) -> PipelineBubble:
    """Returns the time of a step if stages share processors; ``times`` are seconds while all stages compute.

    While more stages compute than there are processors, all slow down equally; while some wait, the others are faster.
    """
    alone = min(1.0, processors / schedule.stages)
    place, left = [0] * schedule.stages, [0.0] * schedule.stages
    busy = [0.0] * schedule.stages
    arrivals: dict[tuple[int, int, bool], float] = {}  # chunk, micro-batch, of a gradient -> when its input is there
    clock = 0.0
    while True:
        waits: list[float] = []
        for stage, actions in enumerate(schedule.actions):
            if left[stage] > 0 or place[stage] == len(actions):
                continue
            kind, chunk, micro_batch = actions[place[stage]]
            ready = 0.0
            if kind is Kind.FORWARD and chunk > 0:
                ready = arrivals.get((chunk, micro_batch, False), math.inf)
            elif kind.gives_input_gradient and chunk < schedule.chunks - 1:
                ready = arrivals.get((chunk, micro_batch, True), math.inf)
            if ready <= clock:
                left[stage] = max(alone * times[chunk].of(kind), _SHORTEST)
            else:
                waits.append(ready)
        active = [stage for stage in range(schedule.stages) if left[stage] > 0]
        if not active and not waits:
            break
        rate = min(1.0, processors / max(len(active), 1))
        step = min([left[stage] / rate for stage in active] + [wait - clock for wait in waits])
        clock += step
        for stage in active:
            busy[stage] += step
            left[stage] -= step * rate
            if left[stage] < _SHORTEST / 2:
                left[stage] = 0.0
                kind, chunk, micro_batch = schedule.actions[stage][place[stage]]
                place[stage] += 1
                if kind is Kind.FORWARD or kind.gives_input_gradient:
                    peer = chunk + (1 if kind is Kind.FORWARD else -1)
                    is_near = 0 <= peer < schedule.chunks and schedule.stage_of[peer] == stage
                    sent = 0.0 if is_near else times[chunk].transfer
                    arrivals[peer, micro_batch, kind is not Kind.FORWARD] = clock + sent
    return PipelineBubble(clock, max(busy))


def idle_shares(stages: int, micro_batches: int) -> dict[str, float]:
    """Returns waiting divided by computing for each schedule, if all stages compute equally long.

    F : B = 1 : 2, half of the backward for weights; with as few chunks as a schedule allows. Found by simulation.
    """
    times = Times(1.0, 2.0, 1.0)
    found = {}
    for name in TRAIN_SCHEDULES:
        pipeline = Pipeline(stages, name)
        share = stages / len(pipeline.stage_of)
        each = Times(*(share * value for value in (times.forward, times.backward, times.weight)))
        found[name] = idle_time(pipeline, dict.fromkeys(range(len(pipeline.stage_of)), each), micro_batches).share
    return found
