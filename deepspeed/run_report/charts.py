"""Pictures of a run as SVG, with colours that follow the page's theme (CSS variables)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 880, 180
_LEFT, _BOTTOM, _TOP = 64, 22, 8
_LEVELS = 8  # shades of a heat map
_COLUMNS = 160
_ROWS = 64


def line_chart(points: Sequence[tuple[float, float]], label: str, marks: Sequence[tuple[float, str, str]] = ()) -> str:
    """Returns a curve.

    Args:
        points: ``(x, y)`` in the order of x.
        label: What y is.
        marks: ``(x, text, CSS class)`` of events, drawn as vertical lines with the text as their title.
    """
    if not points:
        return f"<p class=none>No values of {escape(label)} were written.</p>"
    xs, ys = [x for x, _ in points], [y for _, y in points]
    at_x, at_y = _scale(xs, _LEFT, WIDTH - 8), _scale(ys, HEIGHT - _BOTTOM, _TOP)
    path = " ".join(f"{'L' if i else 'M'}{at_x(x):.1f} {at_y(y):.1f}" for i, (x, y) in enumerate(points))
    drawn = [
        f'<line class="mark {escape(kind)}" x1="{at_x(x):.1f}" x2="{at_x(x):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}">'
        f"<title>{escape(text)}</title></line>"
        for x, text, kind in marks
    ]
    picture = _svg(HEIGHT, label, [*_axes(xs, ys), *drawn, f'<path class="curve" d="{path}"/>'])
    return f"<p class=map>{escape(label)}</p>{picture}"


def stacked_chart(steps: Sequence[int], parts: Mapping[str, Sequence[float]], label: str) -> str:
    """Returns areas on top of each other.

    Args:
        steps: Numbers of the steps.
        parts: Name -> seconds of each step; drawn in this order from the bottom.
        label: What is drawn.
    """
    if not steps:
        return "<p class=none>No step was written.</p>"
    totals = [sum(values[i] for values in parts.values()) for i in range(len(steps))]
    at_x, at_y = _scale(steps, _LEFT, WIDTH - 8), _scale([0.0, *totals], HEIGHT - _BOTTOM, _TOP)
    drawn, below = [], [0.0] * len(steps)
    for number, (name, values) in enumerate(parts.items()):
        above = [low + value for low, value in zip(below, values, strict=True)]
        edge = [(step, y) for step, y in zip(steps, above, strict=True)]
        edge += [(step, y) for step, y in zip(reversed(steps), reversed(below), strict=True)]
        path = " ".join(f"{'L' if i else 'M'}{at_x(x):.1f} {at_y(y):.1f}" for i, (x, y) in enumerate(edge))
        drawn.append(f'<path class="area c{number % 8}" d="{path}Z"><title>{escape(name)}</title></path>')
        below = above
    picture = _svg(HEIGHT, label, [*drawn, *_axes(steps, [0.0, *totals])])
    return f"<p class=map>{escape(label)}</p>{picture}{legend(parts)}"


def legend(names: Sequence[str] | Mapping[str, object]) -> str:
    """Returns the colours of :func:`stacked_chart` with their names."""
    items = "".join(f'<span><i class="c{i % 8}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f"<p class=legend>{items}</p>"


def heat_map(rows: Mapping[int, Sequence[float | None]], label: str, most: float) -> str:
    """Returns a map of ranks (rows) by time (columns); the darker, the longer.

    Args:
        rows: Rank -> seconds of each step, None where it wrote none; equally long. Where there are more ranks or steps
            than the picture has rows and columns, a cell shows the largest of its values.
        label: What took the time.
        most: Seconds that are darkest.
    """
    ranks, columns = list(rows), max((len(values) for values in rows.values()), default=0)
    if not columns or most <= 0:
        return f"<p class=none>{escape(label)}: no time.</p>"
    per_row, per_column = -(-len(ranks) // _ROWS), -(-columns // _COLUMNS)
    lines, width = -(-len(ranks) // per_row), -(-columns // per_column)
    tall, wide = max(4, min(16, 256 // lines)), (WIDTH - _LEFT - 8) / width
    paths: list[list[str]] = [[] for _ in range(_LEVELS)]
    for line in range(lines):
        members = [rows[rank] for rank in ranks[line * per_row : (line + 1) * per_row]]
        for column in range(width):
            cell = [v for m in members for v in m[column * per_column : (column + 1) * per_column] if v is not None]
            if cell:
                level = min(int(max(cell) / most * _LEVELS), _LEVELS - 1)
                corner = f"M{_LEFT + column * wide:.1f} {line * tall}"
                paths[level].append(f"{corner}h{wide:.2f}v{tall}h-{wide:.2f}z")
    texts = [
        f'<text x="{_LEFT - 6}" y="{(line + 1) * tall - 1}" class="tick end">{ranks[line * per_row]}</text>'
        for line in range(0, lines, max(1, lines // 8))
    ]
    drawn = [f'<path class="h{level}" d="{"".join(found)}"/>' for level, found in enumerate(paths) if found]
    title = f"<p class=map>{escape(label)}, ranks by steps; darkest: {most * 1e3:,.1f} ms</p>"
    return title + _svg(lines * tall, label, [*drawn, *texts])


def _svg(height: float, label: str, drawn: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
    return f"{head}{''.join(drawn)}</svg>"


def _scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """Returns what maps values linearly to pixels: the smallest to ``start``, the largest to ``end``."""
    low, high = min(values), max(values)
    factor = (end - start) / ((high - low) or 1.0)
    return lambda value: start + (value - low) * factor


def _axes(xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    at_y = _scale(ys, HEIGHT - _BOTTOM, _TOP)
    found = [
        f'<text x="{_LEFT - 6}" y="{at_y(y) + 4:.1f}" class="tick end">{y:.4g}</text>'
        for y in dict.fromkeys((min(ys), max(ys)))
    ]
    for x, anchor, place in ((min(xs), "start", _LEFT), (max(xs), "end", WIDTH - 8)):
        found.append(f'<text x="{place}" y="{HEIGHT - 6}" class="tick" text-anchor="{anchor}">step {x:g}</text>')
    return found
