"""The streams of a step predicted from its layout: of the first, the busiest and the last stage.

Every pass of a micro-batch through a chunk is drawn block by block, at its time in the schedule. Within a block the
kinds of work come one after another, then its waits: a prediction by layout does not determine their real order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deepspeed.parallel.pipe.schedule.lists import Action, Kind
from deepspeed.parallel.pipe.schedule.simulate import Timeline, simulate
from deepspeed.plan.prediction.block import BlockTimes, WorkTimes
from deepspeed.plan.prediction.step import ChunkTimes, DataExchangeTimes, PredictedStep, StepModel
from deepspeed.plan.timeline.replay import COMPUTE, HOST, SpanFlow, StreamSpan

_SAME_TIME = 1e-9  # seconds: smaller differences are rounding errors
_MOST_PASSES = 4_000  # most passes of blocks drawn per stage; beyond it fewer micro-batches are drawn


@dataclass(frozen=True)
class PredictedTimeline:
    """Spans on the streams of some ranks in one step."""

    ranks: Mapping[str, Sequence[StreamSpan]]  # name of a rank to its spans; the name is empty without pipeline stages
    drawn: int  # micro-batches that have spans
    accumulation: int  # micro-batches of the step
    flows: Sequence[SpanFlow] = ()  # dependencies between the spans


class PassTimeline(NamedTuple):
    """The streams in one computation of a schedule, in seconds from its start."""

    spans: Sequence[StreamSpan]
    flows: Sequence[SpanFlow] = ()


@dataclass
class StageTimeline:
    """The computations of a stage at their times in the schedule."""

    spans: list[StreamSpan] = field(default_factory=list)  # spans of all of them, and the waits between them
    flows: list[SpanFlow] = field(default_factory=list)  # dependencies between the spans
    # first and last span of each action on the compute stream
    ends: dict[Action, tuple[StreamSpan, StreamSpan]] = field(default_factory=dict)


@dataclass
class _SpanBuilder:
    """Appends spans one after another on the compute stream."""

    spans: list[StreamSpan] = field(default_factory=list)
    flows: list[SpanFlow] = field(default_factory=list)
    clock: float = 0.0
    _exchanges: list[StreamSpan] = field(default_factory=list)  # not waited for yet

    def add(self, name: str, seconds: float) -> None:
        if seconds > 0:
            span = StreamSpan(COMPUTE, name, self.clock, self.clock + seconds)
            self.spans.append(span)
            self.clock += seconds
            if not _is_wait(span):
                over = [exchange for exchange in self._exchanges if exchange.end <= span.start + _SAME_TIME]
                self.flows += [SpanFlow("waited for", exchange, span) for exchange in over]
                self._exchanges = [exchange for exchange in self._exchanges if exchange not in over]

    def beside(self, stream: str, name: str, begin: float, seconds: float) -> None:
        if seconds > 0:
            self.spans.append(StreamSpan(stream, name, begin, begin + seconds))
            self._exchanges.append(self.spans[-1])


def place_passes(
    timeline: Timeline, stage: int, passes: Mapping[tuple[int, Kind], PassTimeline], start: float = 0.0
) -> StageTimeline:
    """Returns a stage's computations at their times in the schedule; gaps become waits for other stages.

    ``passes`` has the streams of one micro-batch by chunk and kind; the schedule begins at ``start`` seconds.
    """
    found = StageTimeline()
    free = 0.0
    for action, begin, end in timeline.spans[stage]:
        if begin > free:
            found.spans.append(StreamSpan(COMPUTE, "waits: other stages", start + free, start + begin))
        streams = moved(passes[action.chunk, action.kind], start + begin)
        found.spans += streams.spans
        found.flows += streams.flows
        own = [
            span for span in streams.spans if span.stream == COMPUTE and not _is_wait(span) and span.end > span.start
        ]
        if own:
            found.ends[action] = own[0], own[-1]
        free = end
    if timeline.makespan > free:
        found.spans.append(StreamSpan(COMPUTE, "waits: other stages", start + free, start + timeline.makespan))
    return found


def moved(streams: PassTimeline, by: float) -> PassTimeline:
    """Returns the streams of a computation that starts ``by`` seconds later."""

    def later(span: StreamSpan) -> StreamSpan:
        return span._replace(start=by + span.start, end=by + span.end)

    flows = [flow._replace(source=later(flow.source), target=later(flow.target)) for flow in streams.flows]
    return PassTimeline([later(span) for span in streams.spans], flows)


def flows_between(stages: Mapping[str, StageTimeline]) -> list[SpanFlow]:
    """Returns all dependencies: inside stages, and for data sent between them, directly or through others."""
    found = [
        flow._replace(source_rank=name, target_rank=name) for name, placed in stages.items() for flow in placed.flows
    ]
    where = {action: (name, *ends) for name, placed in stages.items() for action, ends in placed.ends.items()}
    last_chunk = max((action.chunk for action in where), default=0)
    for action, (name, _, last) in where.items():
        if action.kind is Kind.FORWARD:
            what, chunks = "activations", range(action.chunk + 1, last_chunk + 1)
        elif action.kind.gives_input_gradient:
            what, chunks = "gradients", range(action.chunk - 1, -1, -1)
        else:
            continue
        kinds = [Kind.FORWARD] if action.kind is Kind.FORWARD else [Kind.BACKWARD, Kind.BACKWARD_INPUT]
        receivers = (Action(kind, chunk, action.micro_batch) for chunk in chunks for kind in kinds)
        receiver = next((each for each in receivers if each in where), None)
        if receiver is not None and where[receiver][0] != name:
            found.append(SpanFlow(what, last, where[receiver][1], name, where[receiver][0]))
    return found


def _is_wait(span: StreamSpan) -> bool:
    return span.name.startswith(("waits: ", "slowed: "))


def predicted_streams(step: PredictedStep) -> PredictedTimeline:
    """Returns the streams of a predicted step."""
    model = StepModel(step.setup)
    layout, pipeline = step.setup.layout, model.pipeline
    chunks, stages = model.chunks(), model.stages()
    passes_of_a_stage = layout.accumulation * max(1, step.setup.shape.layers // pipeline.stages)
    shown = layout.accumulation if passes_of_a_stage <= _MOST_PASSES else pipeline.enough(layout.accumulation)
    timeline = simulate(pipeline.of(shown), model.schedule_times(chunks))
    passes = {
        (place, kind): _pass(model, chunk, kind)
        for place, chunk in enumerate(chunks)
        for kind in {action.kind for actions in pipeline.of(shown).actions for action in actions}
    }
    busy = model.busy(chunks)
    critical = max(range(len(stages)), key=busy.__getitem__)
    begins = model.data_costs(model.data_exchanges(stages[critical], chunks))[0]
    ranks: dict[str, list[StreamSpan]] = {}
    stages_placed: dict[str, StageTimeline] = {}
    for number in sorted({0, critical, len(stages) - 1}):
        exchanges = model.data_exchanges(stages[number], chunks)
        made = _SpanBuilder()
        _begin(made, exchanges, begins)
        placed = place_passes(timeline, number, passes, made.clock)
        made.spans += placed.spans
        made.clock += timeline.makespan
        update = step.update if number == critical else model.update_seconds(stages[number])
        _end(made, exchanges, model.data_costs(exchanges), update, is_on_host=layout.offload)
        name = f"stage {number}" + (", busiest" if number == critical else "") if layout.pipe > 1 else ""
        placed.flows += made.flows
        ranks[name], stages_placed[name] = made.spans, placed
    return PredictedTimeline(ranks, shown, layout.accumulation, flows_between(stages_placed))


def _pass(model: StepModel, chunk: ChunkTimes, kind: Kind) -> PassTimeline:
    """Returns the streams of one micro-batch in a chunk, from 0 on."""
    made = _SpanBuilder()
    parts = chunk.parts if kind is Kind.FORWARD else chunk.parts[::-1]
    units = [(name, times, number) for name, times, count in parts for number in range(count)]
    if kind is Kind.BACKWARD_WEIGHT:
        for name, times, _ in units:
            made.add(f"{name}: matrix products", times.weight)
        return PassTimeline(made.spans, made.flows)
    whole = chunk.forward if kind is Kind.FORWARD else chunk.backward
    layers, each = sum(name == "block" for name, _, _ in units), model.layer_exchanges()
    waits = chunk.layer_waits[0 if kind is Kind.FORWARD else 1]
    # Exchanges may take less time than their waits, as in a prediction, plus the computation that they slow down.
    exposed = whole.exposed.get("data", 0.0)
    wait = min(1.0, whole.exchanged.get("data", 0.0) / waits.total) if waits.total else 0.0
    slowed = max(0.0, exposed - wait * waits.total) / max(layers, 1)
    for name, times, number in units:
        work = times.forward if kind is Kind.FORWARD else times.backward
        if name == "block" and each is not None:
            if number == 0:
                made.beside("data", "exchange of parameters", made.clock, wait * waits.before)
                made.add("waits: data", wait * waits.before)
            is_last = number == layers - 1
            if kind is not Kind.FORWARD or not is_last:
                seconds = each.gather + (0.0 if kind is Kind.FORWARD else each.reduce)
                made.beside("data", "exchange of a block", made.clock, seconds)
        _unit(made, name, work, times, kind)
        made.add("waits: host", model.host_wait(work))
        if name == "block" and each is not None:
            made.add("waits: data", wait * waits.between if number < layers - 1 or kind is not Kind.FORWARD else 0.0)
            made.add("slowed: data", slowed)
            if number == layers - 1:
                made.beside("data", "exchange of gradients", made.clock, wait * waits.after)
                made.add("waits: data", wait * waits.after)
    return PassTimeline(made.spans, made.flows)


def _unit(made: _SpanBuilder, name: str, work: WorkTimes, times: BlockTimes, kind: Kind) -> None:
    """Adds a block, the embedding or the head: its computation, then its waits."""
    begin = made.clock
    made.add(f"{name}: elementwise operations", work.traffic)
    made.add(f"{name}: matrix products", work.matmul - (times.weight if kind is Kind.BACKWARD_INPUT else 0.0))
    made.add(f"{name}: attention", work.attention)
    for axis, seconds in sorted(work.exposed.items()):
        made.add(f"waits: {axis}", seconds)
        exchanged = work.exchanged.get(axis, 0.0)
        made.beside(axis, f"exchanges of a {name}", max(begin, made.clock - exchanged), exchanged)


def _begin(made: _SpanBuilder, exchanges: DataExchangeTimes, seconds: float) -> None:
    if not exchanges.is_beside:
        return
    waits = min(exchanges.gather_wait, seconds)
    made.beside("data", "gather of updated parameters", 0.0, exchanges.gather)
    made.add("waits: data", waits)
    made.add("slowed: data", seconds - waits)


def _end(
    made: _SpanBuilder, exchanges: DataExchangeTimes, slowed: tuple[float, float], update: float, *, is_on_host: bool
) -> None:
    begin = made.clock
    waits = exchanges.reduce_wait
    if exchanges.is_beside:
        waits = min(waits, slowed[1])
        made.add("slowed: data", slowed[1] - waits)
    made.add("waits: data", waits)
    start = made.clock - exchanges.reduce
    made.beside("data", "reduction of gradients", max(0.0, min(begin, start)), exchanges.reduce)
    if is_on_host:
        made.beside(HOST, "update", made.clock, update)
        made.add("waits: update on the host", update)
    else:
        made.add("update", update)
    if not exchanges.is_beside:
        made.beside("data", "gather of updated parameters", made.clock, exchanges.gather)
        made.add("waits: data", exchanges.gather_wait)
