"""Writes one HTML page about a run that needs no script, no other file and no network."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from deepspeed.errors import DeepSpeedError
from deepspeed.run_report.analysis import OUTLYING, PHASES, RunSummary, analyse, computing, mfu, phase_name
from deepspeed.run_report.failures import FAILURE, find_failures
from deepspeed.run_report.rank_file import OUTSIDE
from deepspeed.run_report.run_data import RunData, read_run

_MOST_MOMENTS = 5

_STYLE = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")


def write_report(folder: Path) -> Path:
    """Writes ``report.html`` and ``report.json`` into ``folder`` (``run_report.path``); returns the path of the page.

    Raises:
        DeepSpeedError: There is no file of a rank, the plan is damaged, or the page cannot be written.
    """
    run = read_run(folder)
    analysis = analyse(run)
    numbers = json.dumps(_finite(_numbers(run, analysis)), indent=1, allow_nan=False)
    for name, text in (("report.json", numbers), ("report.html", make_page(run, analysis))):
        part = folder / f"{name}.{os.getpid()}.part"  # two ranks may write at the same time
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(folder / name)
        except OSError as error:
            with contextlib.suppress(OSError):  # of the same folder or disk
                part.unlink(missing_ok=True)
            raise DeepSpeedError(
                f"{folder / name}: cannot be written ({error.strerror}); correct the permissions of the folder or free "
                f"space on its disk, and run ds_report_run {folder}"
            ) from error
    return folder / "report.html"


def _numbers(run: RunData, analysis: RunSummary) -> dict[str, Any]:
    """Returns the content of ``report.json``: all that the page shows, except the steps of each rank."""
    share = mfu(run, analysis.step_seconds)
    return {
        **asdict(analysis),
        "mfu": flops_share(run, analysis.step_seconds) if share is None else share,
        "peak_memory_bytes": _peak_memory(run),
        "curves": {
            **{name: _series(run, key) for name, key in (("loss", "loss"), ("norm", "norm"), ("learning_rate", "lr"))},
            "tokens_per_second_of_rank": _rates(run),
            **_expert_points(run),
        },
        "plan_beside_run": {
            "time": time_beside_plan(run, analysis.step_seconds),
            "memory": memory_beside_plan(run),
            "bytes": bytes_beside_plan(run),
        },
        "events": all_events(run),
        "ranks": sorted(run.ranks),
        "facts": run.first.facts,
    }


def _finite(value: Any) -> Any:
    """Returns a value with None for infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _peak_memory(run: RunData) -> int:
    return max((line["memory"] for r in run.ranks.values() for line in r.steps.values()), default=0)


def make_page(run: RunData, analysis: RunSummary) -> str:
    """Returns the page as text. Text from the run is escaped."""
    facts = run.first.facts
    ranks, steps = len(run.ranks), analysis.steps
    title = f"Run of {ranks} rank{'s' * (ranks != 1)}, {steps:,} step{'s' * (steps != 1)}"
    body = [
        f"<h1>{escape(title)}</h1>",
        _failed(run, analysis),
        _unfinished(run, analysis),
        *(_about_steps(run, analysis) if steps else ["<p>No step was recorded.</p>"]),
        "<h2>Events</h2>",
        _table(
            ("time", "rank", "step", "what"),
            [(f"{e['time'] - run.began:,.1f} s", e["rank"], e.get("step", ""), e["text"]) for e in all_events(run)],
        )
        or "<p>None: no save, no skipped step, no restart, no failure.</p>",
        "<h2>Versions and configuration</h2>",
        _table(("", ""), [(name, value) for name, value in facts.get("versions", {}).items()]),
        _configuration(facts.get("config", {}), facts.get("defaults", {})),
    ]
    head = f"<meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>\n"


def _about_steps(run: RunData, analysis: RunSummary) -> list[str]:
    """Returns the parts of the page that need at least one step."""
    marks = [(event["step"], event["text"], event["name"]) for event in all_events(run) if "step" in event]
    return [
        _tiles(run, analysis),
        "<h2>What to change first</h2>",
        _list(analysis.advice) or "<p>Nothing stands out: most of the time is computation.</p>",
        _moments(analysis),
        "<h2>Loss</h2>",
        line_chart(_series(run, "loss"), "loss", marks),
        "<h2>Where the time of a step went</h2>",
        _time_chart(run),
        _table(
            ("phase", "", "ms per step", "share"),
            [
                (
                    phase_name(s.phase),
                    f"waiting along {s.axis}" if s.axis else "",
                    s.seconds * 1e3,
                    f"{s.share:.1%}",
                )
                for s in analysis.shares
            ],
        ),
        "<h2>Ranks over time</h2>",
        *_heat_maps(run),
        "<h2>Slow ranks</h2>",
        _table(
            ("rank", "host", "phase", "times the other ranks' median", "of the step"),
            [(s.rank, s.host, phase_name(s.phase), f"{s.factor:.2f}", f"{s.share:.0%}") for s in analysis.slow],
        )
        or "<p>No rank computes 10 % longer than the median of the others.</p>",
        "<h2>Plan beside run</h2>",
        _table(("", "planned", "run", "run / plan"), time_beside_plan(run, analysis.step_seconds)),
        _table(("memory of rank 0", "planned, bytes", "run, bytes", "formula"), memory_beside_plan(run)),
        _table(("bytes sent per step, by axis", "planned", "run", "run / plan"), bytes_beside_plan(run)),
        "<h2>Gradient norm, rate, tokens</h2>",
        line_chart(_series(run, "norm"), "gradient norm"),
        line_chart(_series(run, "lr"), "learning rate"),
        line_chart(_rates(run), "tokens per second, this rank"),
        _experts(run),
    ]


def all_events(run: RunData) -> list[dict[str, Any]]:
    """Returns the events of all ranks in order of time, each with ``rank`` and ``text``."""
    found = [
        {**event, "rank": number, "text": _event_text(event)}
        for number, rank in run.ranks.items()
        for event in rank.events
        if event["name"] not in ("memory", "operations", FAILURE, *_OF_ALL_RANKS)
    ]
    found += _events_of_all_ranks(run)
    found += find_failures(run)
    first = run.first
    found += [
        {"time": t, "rank": first.rank, "name": "restart", "text": "the program was started again"}
        for t in first.starts[1:]
    ]
    before = 0
    for number in sorted(first.steps):
        line = first.steps[number]
        if (skipped := line.get("skipped", 0)) > before:
            text = "the update was skipped: a gradient was not finite"
            found.append({"time": line["time"], "rank": first.rank, "name": "skipped", "step": number, "text": text})
        before = skipped
    return sorted(found, key=lambda event: event["time"])


_OF_ALL_RANKS = ("save", "load", "recovery")
"""Events that every rank writes about the same operation."""


def _events_of_all_ranks(run: RunData) -> list[dict[str, Any]]:
    """Returns each save, load and recovery once, with the rank that took longest."""
    slowest: dict[Any, dict[str, Any]] = {}
    for rank in run.ranks.values():
        times_before: dict[Any, int] = defaultdict(int)  # after a restart, a step may be saved again
        for event in rank.events:
            if event["name"] in _OF_ALL_RANKS:
                what = json.dumps([event["name"], event.get("step"), event.get("tag")])
                key = (what, times_before[what])
                times_before[what] += 1
                if key not in slowest or event.get("seconds", 0) > slowest[key].get("seconds", 0):
                    slowest[key] = {**event, "rank": rank.rank}
    alone = len(run.ranks) == 1
    return [
        {
            **event,
            "text": _event_text({k: v for k, v in event.items() if k != "rank"})
            + ("" if alone else ", the slowest rank"),
        }
        for event in slowest.values()
    ]


def _event_text(event: dict[str, Any]) -> str:
    rest = {name: value for name, value in event.items() if name not in ("kind", "time", "name", "step")}
    words = ", ".join(
        f"{name} {value:,.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in rest.items()
    )
    return f"{event['name']}{': ' * bool(words)}{words}"


def _series(run: RunData, name: str) -> list[tuple[float, float]]:
    steps = run.first.steps
    return [(number, steps[number][name]) for number in sorted(steps) if steps[number].get(name) is not None]


def _rates(run: RunData) -> list[tuple[float, float]]:
    steps = run.first.steps
    return [
        (number, steps[number]["tokens"] / steps[number]["seconds"])
        for number in sorted(steps)
        if steps[number]["tokens"] and steps[number]["seconds"]
    ]


def _tiles(run: RunData, analysis: RunSummary) -> str:
    losses = _series(run, "loss")
    without = ""
    tiles = [
        ("step", f"{analysis.step_seconds * 1e3:,.1f} ms"),
        ("samples per second", f"{analysis.samples_per_second:,.1f}"),
        ("peak memory of a rank", f"{_peak_memory(run) / 2**30:,.2f} GiB"),
    ]
    if analysis.tokens_per_second:
        tiles.insert(1, ("tokens per second", f"{analysis.tokens_per_second:,.0f}"))
    if (share := mfu(run, analysis.step_seconds)) is not None:
        tiles.append(("of the device's FLOP/s (MFU)", f"{share:.1%}"))
    elif (share := flops_share(run, analysis.step_seconds)) is not None:
        tiles.append(("of the device's FLOP/s (MFU, by the plan)", f"{share:.1%}"))
    else:
        without = (
            "No MFU: the table of devices does not have this one (a processor, for example), or the model is compiled; "
            "a plan in run_report.plan has the operations and the rate."
        )
    if losses:
        tiles.insert(0, ("loss", f"{losses[0][1]:.4g} to {losses[-1][1]:.4g}"))
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
    more = f"<p class=none>{without}</p>" if without else ""
    return f"<div class=tiles>{cells}</div>{more}"


def _moments(analysis: RunSummary) -> str:
    """Returns sentences about outlying steps, whose causes are outside the configuration."""
    if not analysis.moments:
        return ""
    texts = [
        f"step {m.step} took {m.seconds:,.3g} s, {m.factor:,.0f} times the median: rank {m.rank}, {phase_name(m.phase)}"
        for m in analysis.moments[:_MOST_MOMENTS]
    ]
    more = len(analysis.moments) - len(texts)
    if more:
        texts.append(f"and {more:,} more")
    return (
        f"<h2>Moments</h2><p>Steps that took far longer than the median; {analysis.moments_share:.0%} of the time of "
        f"all steps lies in them. They do not count above.</p>{_list(texts)}"
    )


def _failed(run: RunData, analysis: RunSummary) -> str:
    if not analysis.failures:
        return ""
    first, *others = analysis.failures
    text = f"Rank {first['rank']} {first['text']} ({first['time'] - run.began:,.1f} s after the start)"
    more = f" {len(others)} more: see Events." if others else ""
    return f"<p class=warning>{escape(text)}.{more}</p>"


def _unfinished(run: RunData, analysis: RunSummary) -> str:
    failed = {failure["rank"] for failure in analysis.failures}
    last = {rank: max(run.ranks[rank].steps, default=0) for rank in analysis.unfinished if rank not in failed}
    if not last:
        return ""
    text = ", ".join(f"rank {rank} after step {step}" for rank, step in list(last.items())[:8])
    more = f" and {len(last) - 8} more" if len(last) > 8 else ""
    return f"<p class=warning>Not ended: {escape(text)}{more}. The run continues, or these ranks were killed.</p>"


def _time_chart(run: RunData) -> str:
    numbers = run.step_numbers
    parts: dict[str, list[float]] = {}
    for phase in PHASES:
        means = [_mean(computing(r.steps[n], phase) for r in run.ranks.values() if n in r.steps) for n in numbers]
        if any(means):
            parts[phase_name(phase)] = means
    waits = [
        _mean(sum(sum(w.values()) for w in r.steps[n]["waits"].values()) for r in run.ranks.values() if n in r.steps)
        for n in numbers
    ]
    parts["waiting for other ranks"] = waits
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    limit = OUTLYING * median(totals) if totals else 0.0
    return stacked_chart(numbers, parts, "seconds per step, the mean over ranks", limit)


def _heat_maps(run: RunData) -> list[str]:
    numbers = run.step_numbers
    found = []
    for phase in PHASES:
        rows = {
            rank: [computing(r.steps[n], phase) if n in r.steps else None for n in numbers]
            for rank, r in sorted(run.ranks.items())
        }
        most = max(
            (value for values in rows.values() for value in values[2:] or values if value is not None), default=0.0
        )
        if most > 0:
            # the slowest row's, so that a rank that is always slow is dark
            usual = max((median(v) for row in rows.values() if (v := [s for s in row if s is not None])), default=0.0)
            shown = min(most, OUTLYING * usual or most)
            name = phase_name(phase)
            found.append(heat_map(rows, name if phase == OUTSIDE else f"computing in {name}", shown, most))
    return found


def _experts(run: RunData) -> str:
    """Returns the curves of experts' loads, of the worst layer, and all further values of the last step."""
    charts = [line_chart(points, _EXPERT_CURVES[name]) for name, points in _expert_points(run).items()]
    heading = "<h2>Loads of experts</h2>" if charts else ""
    last = run.first.steps[max(run.first.steps)] if run.first.steps else {}
    rows = [(name, f"{value:.4g}") for name, value in last.get("more", {}).items()]
    further = f"<h2>Further values of the last step</h2>{_table(('value', ''), rows)}" if rows else ""
    return f"{heading}{''.join(charts)}{further}"


def _expert_points(run: RunData) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name in _EXPERT_CURVES:
        for number, line in sorted(run.first.steps.items()):
            values = [v for key, v in line.get("more", {}).items() if key.endswith(f"/{name}")]
            if values:
                found[name].append((float(number), float(max(values))))
    return dict(found)


_EXPERT_CURVES = {
    "imbalance": "routes of the most loaded expert over the mean, the layer where it is highest, tokens of rank 0",
    "dropped_percent": "routes dropped for lack of capacity, percent, the layer where it is highest, tokens of rank 0",
}


def _configuration(config: dict[str, Any], defaults: dict[str, Any]) -> str:
    rows = [
        f"<tr class={'set' if name in config else 'default'}><td>{escape(name)}</td>"
        f"<td>{escape(json.dumps(config.get(name, defaults.get(name))))}</td>"
        f"<td>{'set' if name in config else 'default'}</td></tr>"
        for name in sorted({*config, *defaults})
    ]
    head = "<tr><th>key</th><th>value</th><th></th></tr>"
    summary = f"<summary>Configuration, {len(config)} keys set</summary>"
    return f"<details>{summary}<div class=scroll><table>{head}{''.join(rows)}</table></div></details>"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _list(texts: Sequence[str]) -> str:
    return f"<ol>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ol>" if texts else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    cells = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<div class=scroll><table><tr>{titles}</tr>{cells}</table></div>"


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return f"<td>{escape(value)}</td>"
    text = (
        f"{value:,}" if isinstance(value, int) else f"{value:,.2f}" if isinstance(value, float) else escape(str(value))
    )
    return f"<td class=number>{text}</td>"


Row = tuple[Any, ...]


def time_beside_plan(run: RunData, step_seconds: float) -> list[Row]:
    """Returns ``(name, planned, run, ratio)`` of the median step and the first peak memory; empty without a plan."""
    rows = []
    if (bound := _number(run.plan, "step_seconds_at_least")) is not None:
        rows.append(_row("milliseconds per step, at least", bound * 1e3, step_seconds * 1e3))
    planned = _number(run.plan, "peak", "device", "bytes")
    if planned is not None and run.first.facts.get("device") != "cpu":  # on the CPU, memory is that of the process
        found = max((line["memory"] for line in run.first.steps.values()), default=0)
        rows.append(_row("peak of device memory, bytes", planned, found))
    return rows


def memory_beside_plan(run: RunData) -> list[Row]:
    """Returns ``(kind, planned bytes, counted bytes, formula)`` of the first rank's memory between two steps."""
    rows: list[Row] = next((event["rows"] for event in reversed(run.first.events) if event["name"] == "memory"), [])
    return [(kind, planned, counted, formula) for kind, counted, planned, formula in rows]


def bytes_beside_plan(run: RunData) -> list[Row]:
    """Returns ``(axis, planned, run, ratio)`` for the bytes that the first rank sends per step: the median."""
    lines = [run.first.steps[number] for number in sorted(run.first.steps)[1:]]
    axes = sorted({axis for line in lines for axis in line["bytes"]})
    planned: Mapping[str, Any] = (run.plan or {}).get("sent_by_axis", {})
    return [_row(axis, planned.get(axis), int(median(line["bytes"].get(axis, 0) for line in lines))) for axis in axes]


def flops_share(run: RunData, step_seconds: float) -> float | None:
    """Returns the share of the device's rate that the planned operations reach; None without a plan that has both.

    Operations that recomputation repeats count: it is the utilization of the hardware (HFU).
    """
    flops, rate = _number(run.plan, "flops"), _number(run.plan, "device_flops")
    return flops / step_seconds / rate if flops and rate and step_seconds else None


def _row(what: str, planned: float | None, found: float) -> Row:
    return (
        (what, "", found, "")
        if planned is None
        else (what, planned, found, f"{found / planned:.3f}" if planned else "")
    )


def _number(values: Any, *path: str) -> float | None:
    for name in path:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values if isinstance(values, (int, float)) else None


WIDTH, HEIGHT = 880, 180
_LEFT, _BOTTOM, _TOP = 64, 22, 8
_LEVELS = 8  # shades of a heat map
_COLUMNS = 160
_ROWS = 64


def line_chart(points: Sequence[tuple[float, float]], label: str, marks: Sequence[tuple[float, str, str]] = ()) -> str:
    """Returns a curve as HTML with an SVG.

    Args:
        points: ``(x, y)`` in the order of x.
        marks: ``(x, text, CSS class)`` of events, drawn as vertical lines with the text as their title.
    """
    if not points:
        return f"<p class=none>{escape(label)}: not recorded.</p>"
    missing = [int(x) for x, y in points if not math.isfinite(y)]
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if missing:
        label = f"{label}; not finite: {_steps_text(missing)}"
    if not points:
        return f"<p class=none>{escape(label)}</p>"
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


def stacked_chart(steps: Sequence[int], parts: Mapping[str, Sequence[float]], label: str, limit: float = 0.0) -> str:
    """Returns stacked areas as HTML with an SVG.

    Args:
        parts: Seconds of each step by name; drawn in this order from the bottom.
        limit: Higher sums are cut off, as one long step would flatten all others; 0: none is cut.
    """
    if not steps:
        return "<p class=none>No step was written.</p>"
    totals = [sum(values[i] for values in parts.values()) for i in range(len(steps))]
    cut = [step for step, total in zip(steps, totals, strict=True) if total > limit > 0]
    if cut:
        shares = [min(limit / total, 1.0) if total else 1.0 for total in totals]
        parts = {name: [v * s for v, s in zip(values, shares, strict=True)] for name, values in parts.items()}
        totals = [min(total, limit) for total in totals]
        label = f"{label}; cut at {limit:.3g}: {_steps_text(cut)}"
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


def _steps_text(steps: Sequence[int]) -> str:
    more = f" and {len(steps) - 3:,} more" if len(steps) > 3 else ""
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps[:3]))}{more}"


def legend(names: Sequence[str] | Mapping[str, object]) -> str:
    """Returns the legend of :func:`stacked_chart` as HTML."""
    items = "".join(f'<span><i class="c{i % 8}"></i>{escape(name)}</span>' for i, name in enumerate(names))
    return f"<p class=legend>{items}</p>"


def heat_map(rows: Mapping[int, Sequence[float | None]], label: str, most: float, longest: float = 0.0) -> str:
    """Returns a map of ranks (rows) by time (columns); the darker, the longer.

    Args:
        rows: Seconds of each step by rank, None for steps that are not in the file; all equally long. If there are
            more ranks or steps than rows and columns in the picture, a cell shows its largest value.
        most: Seconds at which a cell has the strongest color: dark on a light page, bright on a dark one.
        longest: The largest time, shown if it is longer.
    """
    ranks, columns = list(rows), max((len(values) for values in rows.values()), default=0)
    if not columns or most <= 0:
        return f"<p class=none>{escape(label)}: no time.</p>"
    per_row, per_column = -(-len(ranks) // _ROWS), -(-columns // _COLUMNS)
    lines, width = -(-len(ranks) // per_row), -(-columns // per_column)
    cell_height, cell_width = max(4, min(16, 256 // lines)), (WIDTH - _LEFT - 8) / width
    paths: list[list[str]] = [[] for _ in range(_LEVELS)]
    for line in range(lines):
        members = [rows[rank] for rank in ranks[line * per_row : (line + 1) * per_row]]
        for column in range(width):
            cell = [v for m in members for v in m[column * per_column : (column + 1) * per_column] if v is not None]
            if cell:
                level = min(int(max(cell) / most * _LEVELS), _LEVELS - 1)
                corner = f"M{_LEFT + column * cell_width:.1f} {line * cell_height}"
                paths[level].append(f"{corner}h{cell_width:.2f}v{cell_height}h-{cell_width:.2f}z")
    texts = [
        f'<text x="{_LEFT - 6}" y="{(line + 1) * cell_height - 1}" class="tick end">{ranks[line * per_row]}</text>'
        for line in range(0, lines, max(1, lines // 8))
    ]
    drawn = [f'<path class="h{level}" d="{"".join(found)}"/>' for level, found in enumerate(paths) if found]
    strongest = f"{most * 1e3:,.1f} ms" + (f" and more (up to {longest * 1e3:,.1f} ms)" if longest > most else "")
    title = f"<p class=map>{escape(label)}, ranks by steps; strongest color: {strongest}</p>"
    return title + _svg(lines * cell_height, label, [*drawn, *texts])


def _svg(height: float, label: str, drawn: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
    return f"<div class=scroll>{head}{''.join(drawn)}</svg></div>"


def _scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    """Returns a function that maps values linearly to pixels: the smallest to ``start``, the largest to ``end``."""
    low, high = min(values), max(values)
    factor = (end - start) / ((high - low) or 1.0)
    return lambda value: start + (value - low) * factor


def _axes(xs: Sequence[float], ys: Sequence[float]) -> list[str]:
    at_y = _scale(ys, HEIGHT - _BOTTOM, _TOP)
    found = [
        f'<text x="{_LEFT - 6}" y="{at_y(y) + 4:.1f}" class="tick end">{y:.4g}</text>'
        for y in dict.fromkeys((min(ys), max(ys)))
    ]
    for x, anchor, x_pixel in ((min(xs), "start", _LEFT), (max(xs), "end", WIDTH - 8)):
        found.append(f'<text x="{x_pixel}" y="{HEIGHT - 6}" class="tick" text-anchor="{anchor}">step {x:g}</text>')
    return found
