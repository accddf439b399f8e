"""The timeline of a step, as lines of text and as a drawing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from deepspeed.parallel.pipe.schedule.lists import Action, Kind, Schedule
from deepspeed.parallel.pipe.schedule.simulate import Timeline

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, inputs",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}
_COLOURS = {
    Kind.FORWARD: "#5b8cc9",
    Kind.BACKWARD: "#54a24b",
    Kind.BACKWARD_INPUT: "#8cc084",
    Kind.BACKWARD_WEIGHT: "#f58518",
}
_LABEL, _ROW, _BAR, _TOP = 62, 26, 22, 50  # pixels: width of a row's name, height of a row and of its bars, first row

# As a part of a page of the site it takes the page's colours, as a picture by itself those of the reader's system.
_STYLE = """\
.picture { --ink: var(--md-typeset-color, #222); --line: var(--md-default-fg-color--lighter, #aaa); }
@media (prefers-color-scheme: dark) {
  .picture { --ink: var(--md-typeset-color, #ddd); --line: var(--md-default-fg-color--lighter, #777); }
}
.picture text { fill: var(--ink); }
.picture .whole { fill: none; stroke: var(--line); }
.picture g text { fill: #111; font-size: 11px; text-anchor: middle; }
.picture g rect { stroke: #fff; stroke-width: 0.5; }
"""
_STYLE += "\n".join(f".picture .{kind.value} {{ fill: {colour}; }}" for kind, colour in _COLOURS.items())


def letter(action: Action) -> str:
    """One character: the micro-batch as a digit in forwards, as a letter in backwards, a capital one for weights."""
    if action.kind is Kind.FORWARD:
        return str(action.micro_batch % 10)
    small = chr(ord("a") + action.micro_batch % 26)
    return small.upper() if action.kind is Kind.BACKWARD_WEIGHT else small


def lines(timeline: Timeline, width: int) -> list[str]:
    """One line of text per stage, at most ``width`` characters; dots where the stage is idle.

    A character stands for the shortest computation where that fits, else for more.
    """
    shortest = min((span.end - span.start for spans in timeline.spans for span in spans), default=0.0)
    unit = max(timeline.makespan / max(width, 1), shortest) or 1.0
    found = []
    for spans in timeline.spans:
        cells = ["."] * round(timeline.makespan / unit)
        for span in spans:
            for cell in range(round(span.start / unit), round(span.end / unit)):
                cells[cell] = letter(span.action)
        found.append("".join(cells))
    return found


def title(schedule: Schedule, timeline: Timeline) -> str:
    """Returns what a timeline shows, in words; its times are milliseconds."""
    chunks = schedule.chunks // schedule.stages
    return f"{schedule.name}{f', {chunks} chunks per stage' if chunks > 1 else ''}: {timeline.makespan:g} ms"


def svg(titled: Sequence[tuple[str, Schedule, Timeline]], width: int = 900) -> str:
    """Draws timelines below each other, on one scale of time.

    Args:
        titled: Title, schedule and its timeline of each.
        width: Of the drawing, in pixels.
    """
    scale = (width - _LABEL - 8) / max(timeline.makespan for _, _, timeline in titled)
    kinds = {span.action.kind for _, _, timeline in titled for spans in timeline.spans for span in spans}
    parts, left = [], 1
    for kind in (kind for kind in Kind if kind in kinds):
        parts.append(f'<rect x="{left}" y="4" width="12" height="12" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{left + 18}" y="15">{_WORDS[kind]}</text>')
        left += 40 + 8 * len(_WORDS[kind])
    parts.append(f'<text x="{left}" y="15">faint: the later chunks of a stage</text>')
    top = _TOP
    for name, schedule, timeline in titled:
        parts.append(f'<text x="1" y="{top - 8}" font-weight="bold">{escape(name)}</text>')
        for stage, spans in enumerate(timeline.spans):
            place = f'y="{top}" height="{_BAR}"'
            parts.append(f'<text x="1" y="{top + 16}">stage {stage}</text>')
            end = timeline.makespan * scale
            parts.append(f'<rect class="whole" x="{_LABEL}" {place} width="{end:.1f}"/>')
            own = schedule.chunks_of(stage)
            for action, start, end in spans:
                x, wide = _LABEL + start * scale, (end - start) * scale
                opacity = 1 - 0.5 * own.index(action.chunk) / len(own)
                words = f"{_WORDS[action.kind]} of micro-batch {action.micro_batch}, chunk {action.chunk}"
                faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
                parts.append(
                    f'<g><title>{words}</title><rect x="{x:.1f}" {place} width="{wide:.1f}" class="{action.kind.value}"'
                    f'{faint}/><text x="{x + wide / 2:.1f}" y="{top + 16}">{action.micro_batch}</text></g>'
                )
            top += _ROW
        top += 36
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {width} {top - 24}" width="{width}" '
        'font-family="sans-serif" font-size="14">'
    )
    return "\n".join([head, f"<style>\n{_STYLE}\n</style>", *parts, "</svg>"]) + "\n"
