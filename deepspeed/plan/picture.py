"""Draws plans as SVG without a plotting library: the memory of a sweep, and the streams of a step.

Streams can also be written as a trace for Perfetto or chrome://tracing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from deepspeed.accelerator.devices import in_words
from deepspeed.plan.prediction.step_times import StepTimes
from deepspeed.plan.sweep import Point, frontier
from deepspeed.plan.timeline.predicted_streams import PredictedTimeline
from deepspeed.plan.timeline.replay import (
    COMPUTE,
    COPY_DOWN,
    COPY_UP,
    FILE_READ,
    FILE_WRITE,
    HOST,
    SpanFlow,
    StreamSpan,
)

_STEP_LEFT, _NAMED, _STEP_WIDTH, _ROW, _STEP_TOP = 150, 100, 1100, 34, 60
_STEP_COLORS = {
    "product": "#1b6ca8",
    "attention": "#588157",
    "other": "#a8c5da",
    "update": "#8d5a97",
    "exposed": "#c8553d",
    "idle": "#dddddd",
    "exchange": "#b08900",
}
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmm_"})
_IDLE = ("host", "other stages", "another stream", "copies", "files", "update on the host")  # waits for no exchange
_UNIT = 1e-3  # microseconds: the precision of times in a trace
_LEAST = 0.4  # pixels: neighbors of one color are drawn as one rectangle up to this gap


def step_picture(step: StepTimes, streams: PredictedTimeline, title: str, *, is_trace: bool) -> str:
    """Returns the streams of a step as SVG or as a trace for Perfetto; the title tells what is left out."""
    if is_trace:
        return step_trace_json(streams.ranks, streams.flows)
    if streams.drawn < streams.accumulation:
        title += f"; {streams.drawn} of {streams.accumulation} micro-batches are drawn"
    return step_svg(step, streams.ranks, title)


def step_svg(step: StepTimes, ranks: Mapping[str, Sequence[StreamSpan]], title: str) -> str:
    """Returns the streams by rank as SVG, the times of ``step`` above; exchanges that computation waits for are red."""
    rows = [(name, stream) for name, spans in ranks.items() for stream in _streams(spans)]
    end = max((span.end for spans in ranks.values() for span in spans), default=0.0) or 1.0
    scale = _STEP_WIDTH / end
    left = _STEP_LEFT + (_NAMED if any(ranks) else 0)
    height = _STEP_TOP + _ROW * len(rows) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + _STEP_WIDTH + 40}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="10" y="42">{escape(_legend(step))}</text>',
    ]
    for number, (name, stream) in enumerate(rows):
        y = _STEP_TOP + _ROW * number
        label = f"{name}: {stream}" if name else stream
        parts.append(f'<text x="10" y="{y + 18}">{escape(label)}</text>')
        parts.append(f'<line x1="{left}" y1="{y + 26}" x2="{left + _STEP_WIDTH}" y2="{y + 26}" stroke="#ddd"/>')
        for kind, first, last in _merged([span for span in ranks[name] if span.stream == stream], _LEAST / scale):
            width = max((last - first) * scale, 0.2)
            parts.append(
                f'<rect x="{left + first * scale:.1f}" y="{y + 4}" width="{width:.1f}" height="22" '
                f'fill="{_STEP_COLORS[kind]}"/>'
            )
    y = _STEP_TOP + _ROW * len(rows) + 20
    for tick in range(6):
        x = left + _STEP_WIDTH * tick / 5
        parts.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{1e3 * end * tick / 5:,.1f} ms</text>')
    return "\n".join([*parts, "</svg>", ""])


def step_trace_json(ranks: Mapping[str, Sequence[StreamSpan]], flows: Sequence[SpanFlow] = ()) -> str:
    """Returns the streams of a step by rank as Chrome's trace events, times in microseconds.

    Starts and ends are rounded alike, so that spans do not overlap; viewers would nest them and lose arrows.
    Spans shorter than a nanosecond are left out.

    What computation waits for has the category ``exposed`` where it is an exchange, else ``idle``. Dependencies are
    flow events, which viewers draw as arrows from the end of one span to the start of another.
    """
    events: list[dict[str, object]] = []
    tracks: dict[tuple[str, str], dict[str, int]] = {}
    for rank, (name, spans) in enumerate(ranks.items()):
        streams = _streams(spans)
        tracks |= {(name, stream): {"pid": rank, "tid": number} for number, stream in enumerate(streams)}
        if name:
            events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}})
        events += [
            {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": stream}}
            for number, stream in enumerate(streams)
        ]
        events += [
            {
                "ph": "X",
                **tracks[name, span.stream],
                "name": span.name,
                "ts": _microseconds(span.start),
                "dur": duration,
                "cat": _kind(span),
            }
            for span in spans
            if (duration := _duration(span)) >= _UNIT
        ]
    for number, flow in enumerate(flows):
        events += _flow_events(number, flow, tracks)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}) + "\n"


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _duration(span: StreamSpan) -> float:
    return round(_microseconds(span.end) - _microseconds(span.start), 3)


def _flow_events(
    number: int, flow: SpanFlow, tracks: Mapping[tuple[str, str], Mapping[str, int]]
) -> list[dict[str, object]]:
    """Returns both ends of an arrow, each inside its span; none where one of the spans is left out."""
    source, target = flow.source, flow.target
    if min(_duration(source), _duration(target)) < _UNIT:
        return []
    shared = {"id": number, "name": flow.name, "cat": "flow"}
    inside = round(_microseconds(source.end) - _UNIT, 3)
    return [
        {"ph": "s", **tracks[flow.source_rank, source.stream], **shared, "ts": inside},
        {"ph": "f", "bp": "e", **tracks[flow.target_rank, target.stream], **shared, "ts": _microseconds(target.start)},
    ]


def _streams(spans: Sequence[StreamSpan]) -> list[str]:
    first = [COMPUTE, HOST, COPY_UP, COPY_DOWN, FILE_READ, FILE_WRITE]
    found = {span.stream for span in spans}
    return [name for name in first if name in found] + sorted(found.difference(first))


def _kind(span: StreamSpan) -> str:
    if span.stream.startswith("stream "):
        return "other"
    if span.stream == HOST:
        return "update"
    if span.stream != COMPUTE:
        return "exchange"
    if span.name.startswith(("waits: ", "slowed: ")):
        return "idle" if span.name.removeprefix("waits: ") in _IDLE else "exposed"
    if span.name == "update":
        return "update"
    if "attention" in span.name:
        return "attention"
    return "product" if span.name in _PRODUCTS or span.name.endswith("matrix products") else "other"


def _merged(spans: Sequence[StreamSpan], gap: float) -> list[tuple[str, float, float]]:
    found: list[tuple[str, float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        kind = _kind(span)
        if found and found[-1][0] == kind and span.start - found[-1][2] <= gap:
            found[-1] = (kind, found[-1][1], max(found[-1][2], span.end))
        else:
            found.append((kind, span.start, span.end))
    return found


def _legend(step: StepTimes) -> str:
    waits = ", ".join(
        f"{axis} {1e3 * seconds:,.1f} ms" for axis, seconds in sorted(step.exposed.items()) if seconds > 0
    )
    text = (
        "blue: matrix products, green: attention, light: elementwise, purple: update, ochre: exchanges, red: exposed "
        "exchanges, grey: other waits"
    )
    return f"{text}. Whole step: {1e3 * step.seconds:,.1f} ms" + (f"; exposed: {waits}" if waits else "")


_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 250, 40, 50
_COLORS = ("#1b6ca8", "#c8553d", "#588157", "#8d5a97", "#b08900", "#3d5a80", "#9b2226", "#2a9d8f")


def sweep_svg(points: Sequence[Point]) -> str:
    """Draws a line per combination of the other axes; filled marks are the frontier, crosses do not fit."""
    planned = [point for point in points if point.plan is not None]
    if not planned:
        return _document(['<text x="20" y="30">every combination was refused</text>'])
    worlds = sorted({_world(point) for point in planned})
    limit = max(point.plan.machine.usable for point in planned if point.plan is not None)
    sizes = [point.plan.device_bytes for point in planned if point.plan is not None]
    low, high = math.log(min(*sizes, limit) / 1.3), math.log(max(*sizes, limit) * 1.3)

    def x_of(world: int) -> float:
        span = math.log(worlds[-1]) - math.log(worlds[0])
        share = (math.log(world) - math.log(worlds[0])) / span if span else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y_of(nbytes: float) -> float:
        return _TOP + (high - math.log(nbytes)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    best = frontier(points)
    parts = [f'<text x="{_LEFT}" y="24" font-weight="bold">device memory of a step, by ranks</text>']
    for world in worlds:
        parts.append(f'<text x="{x_of(world):.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{world:,}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">ranks</text>')
    for exponent in range(20, 50):
        if low < math.log(2**exponent) < high:
            y = y_of(2**exponent)
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{in_words(2**exponent)}</text>')
    y = y_of(limit)
    parts.append(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#000" stroke-dasharray="6 4"/>'
        f'<text x="{_WIDTH - _RIGHT + 6}" y="{y + 4:.1f}">usable: {in_words(limit)}</text>'
    )
    for number, (label, members) in enumerate(_lines(planned).items()):
        color = _COLORS[number % len(_COLORS)]
        places = [(x_of(_world(p)), y_of(p.plan.device_bytes), p) for p in members if p.plan is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts += [_mark(x, y, color, point, point in best) for x, y, point in places]
        row = _TOP + 40 + 18 * number
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 6}" y="{row - 9}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 22}" y="{row}">{escape(label)}</text>')
    return _document(parts)


def _world(point: Point) -> int:
    assert point.plan is not None
    return point.plan.machine.ranks


def _lines(points: Sequence[Point]) -> dict[str, list[Point]]:
    lines: dict[str, list[Point]] = {}
    for point in sorted(points, key=_world):
        words = [f"{axis} {value}" for axis, value in point.place.items() if axis != "world"]
        lines.setdefault(", ".join(words) or "all", []).append(point)
    return lines


def _mark(x: float, y: float, color: str, point: Point, on_frontier: bool) -> str:
    assert point.plan is not None
    if not point.plan.fits:
        return f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{color}" stroke-width="2"/>'
    fill = color if on_frontier else "#fff"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{color}" stroke-width="2"/>'


def _document(parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
