"""Pictures of a step: its streams as SVG, and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from deepspeed.plan.prediction.step_times import StepTimes
from deepspeed.plan.timeline.replay import COMPUTE, COPY_DOWN, COPY_UP, FILE_READ, FILE_WRITE, HOST, StreamSpan

_LEFT, _NAMED, _WIDTH, _ROW, _TOP = 150, 100, 1100, 34, 60
_COLOURS = {
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
_LEAST = 0.4  # pixels: neighbours of one colour are drawn as one rectangle up to this gap


def step_svg(step: StepTimes, ranks: Mapping[str, Sequence[StreamSpan]], title: str) -> str:
    """Returns the streams of a step as SVG; exchanges that computation waits for are red.

    Args:
        step: Its times stand above.
        ranks: By name of a rank, what its streams do; one rank may have no name.
        title: Stands above.
    """
    rows = [(name, stream) for name, spans in ranks.items() for stream in _streams(spans)]
    end = max((span.end for spans in ranks.values() for span in spans), default=0.0) or 1.0
    scale = _WIDTH / end
    left = _LEFT + (_NAMED if any(ranks) else 0)
    height = _TOP + _ROW * len(rows) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + _WIDTH + 40}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="10" y="42">{escape(_legend(step))}</text>',
    ]
    for number, (name, stream) in enumerate(rows):
        y = _TOP + _ROW * number
        label = f"{name}: {stream}" if name else stream
        parts.append(f'<text x="10" y="{y + 18}">{escape(label)}</text>')
        parts.append(f'<line x1="{left}" y1="{y + 26}" x2="{left + _WIDTH}" y2="{y + 26}" stroke="#ddd"/>')
        for kind, first, last in _merged([span for span in ranks[name] if span.stream == stream], _LEAST / scale):
            width = max((last - first) * scale, 0.2)
            parts.append(
                f'<rect x="{left + first * scale:.1f}" y="{y + 4}" width="{width:.1f}" height="22" '
                f'fill="{_COLOURS[kind]}"/>'
            )
    y = _TOP + _ROW * len(rows) + 20
    for tick in range(6):
        x = left + _WIDTH * tick / 5
        parts.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{1e3 * end * tick / 5:,.1f} ms</text>')
    return "\n".join([*parts, "</svg>", ""])


def step_trace_json(ranks: Mapping[str, Sequence[StreamSpan]]) -> str:
    """Returns the streams of a step as Chrome's trace events, times in microseconds.

    What computation waits for has the category ``exposed`` where it is an exchange, else ``idle``.

    Args:
        ranks: By name of a rank, what its streams do; one rank may have no name.
    """
    events: list[dict[str, object]] = []
    for rank, (name, spans) in enumerate(ranks.items()):
        streams = _streams(spans)
        if name:
            events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}})
        events += [
            {"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": {"name": stream}}
            for number, stream in enumerate(streams)
        ]
        events += [
            {
                "ph": "X",
                "pid": rank,
                "tid": streams.index(span.stream),
                "name": span.name,
                "ts": round(1e6 * span.start, 3),
                "dur": round(1e6 * (span.end - span.start), 3),
                "cat": _kind(span),
            }
            for span in spans
        ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


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
