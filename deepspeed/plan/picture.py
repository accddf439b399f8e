"""The picture of a sweep: device memory over the number of ranks, as SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from deepspeed.accelerator.devices import in_words
from deepspeed.plan.sweep import Point, frontier

_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 250, 40, 50
_COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8d5a97", "#b08900", "#3d5a80", "#9b2226", "#2a9d8f")


def sweep_svg(points: Sequence[Point]) -> str:
    """One line per combination of the other axes; filled marks are on the frontier, crosses do not fit.

    Both axes are logarithmic.

    Args:
        points: Of a sweep; those that were refused are left out.
    """
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
        colour = _COLOURS[number % len(_COLOURS)]
        places = [(x_of(_world(p)), y_of(p.plan.device_bytes), p) for p in members if p.plan is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [_mark(x, y, colour, point, point in best) for x, y, point in places]
        row = _TOP + 40 + 18 * number
        parts.append(f'<rect x="{_WIDTH - _RIGHT + 6}" y="{row - 9}" width="10" height="10" fill="{colour}"/>')
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


def _mark(x: float, y: float, colour: str, point: Point, on_frontier: bool) -> str:
    assert point.plan is not None
    if not point.plan.fits:
        return f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{colour}" stroke-width="2"/>'
    fill = colour if on_frontier else "#fff"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{colour}" stroke-width="2"/>'


def _document(parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )
