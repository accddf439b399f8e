"""Pictures of a step: its streams as SVG, and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from xml.sax.saxutils import escape

from deepspeed.plan.timeline.replay import COMPUTE, COPY_DOWN, COPY_UP, HOST, StreamSpan
from deepspeed.plan.timeline.timed_step import TimedStep

_LEFT, _WIDTH, _ROW, _TOP = 150, 1100, 34, 60
_COLOURS = {"product": "#1b6ca8", "attention": "#588157", "other": "#a8c5da", "waits": "#c8553d", "exchange": "#b08900"}
_LEAST = 0.4  # pixels: neighbours of one colour are drawn as one rectangle up to this gap


def step_svg(step: TimedStep, title: str) -> str:
    """Returns the streams of a step as SVG; what computation waits for is red.

    Args:
        step: The step.
        title: Stands above.
    """
    streams = _streams(step.spans)
    end = max((span.end for span in step.spans), default=0.0) or 1.0
    scale = _WIDTH / end
    height = _TOP + _ROW * len(streams) + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        f'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="22" font-size="15">{escape(title)}</text>',
        f'<text x="10" y="42">{escape(_legend(step))}</text>',
    ]
    for number, stream in enumerate(streams):
        y = _TOP + _ROW * number
        parts.append(f'<text x="10" y="{y + 18}">{escape(stream)}</text>')
        parts.append(f'<line x1="{_LEFT}" y1="{y + 26}" x2="{_LEFT + _WIDTH}" y2="{y + 26}" stroke="#ddd"/>')
        for kind, first, last in _merged([span for span in step.spans if span.stream == stream], _LEAST / scale):
            width = max((last - first) * scale, 0.2)
            parts.append(
                f'<rect x="{_LEFT + first * scale:.1f}" y="{y + 4}" width="{width:.1f}" height="22" '
                f'fill="{_COLOURS[kind]}"/>'
            )
    y = _TOP + _ROW * len(streams) + 20
    for tick in range(6):
        x = _LEFT + _WIDTH * tick / 5
        parts.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{1e3 * end * tick / 5:,.1f} ms</text>')
    return "\n".join([*parts, "</svg>", ""])


def step_trace_json(step: TimedStep) -> str:
    """Returns the streams of a step as Chrome's trace events, times in microseconds."""
    streams = _streams(step.spans)
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": stream}}
        for number, stream in enumerate(streams)
    ]
    for span in step.spans:
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": streams.index(span.stream),
                "name": span.name,
                "ts": round(1e6 * span.start, 3),
                "dur": round(1e6 * (span.end - span.start), 3),
                "cat": _kind(span),
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _streams(spans: Sequence[StreamSpan]) -> list[str]:
    first = [COMPUTE, HOST, COPY_UP, COPY_DOWN]
    found = {span.stream for span in spans}
    return [name for name in first if name in found] + sorted(found.difference(first))


def _kind(span: StreamSpan) -> str:
    if span.stream.startswith("stream "):
        return "other"
    if span.stream != COMPUTE:
        return "exchange"
    if span.name.startswith("waits"):
        return "waits"
    if "attention" in span.name:
        return "attention"
    return "product" if span.name in ("mm", "addmm", "bmm", "baddbmm", "addmm_") else "other"


def _merged(spans: Sequence[StreamSpan], gap: float) -> list[tuple[str, float, float]]:
    found: list[tuple[str, float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        kind = _kind(span)
        if found and found[-1][0] == kind and span.start - found[-1][2] <= gap:
            found[-1] = (kind, found[-1][1], max(found[-1][2], span.end))
        else:
            found.append((kind, span.start, span.end))
    return found


def _legend(step: TimedStep) -> str:
    waits = ", ".join(
        f"{axis} {1e3 * seconds:,.1f} ms" for axis, seconds in sorted(step.exposed.items()) if seconds > 0
    )
    text = "blue: matrix products, green: attention, light: elementwise, red: waits for exchanges, ochre: exchanges"
    return f"{text}. Whole step: {1e3 * step.seconds:,.1f} ms" + (f"; exposed: {waits}" if waits else "")
