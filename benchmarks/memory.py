"""Curves of peak memory per rank beside FSDP2: against the number of ranks, and against the size of the model.

Run ``python benchmarks/memory.py --help``; ``benchmarks/README.md`` describes what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contest.arena import Arena
from contest.contestants import CONTESTANTS
from contest.report import hardware
from contest.workloads import gpt

_HERE = Path(__file__).resolve().parent
OURS, THEIRS, THEIRS_TUNED = "ours-3", "fsdp2", "fsdp2-malloc"
ENTRIES = (OURS, THEIRS, THEIRS_TUNED)
RANKS = (1, 2, 3, 4)
LAYERS = (2, 4, 8, 16)
BASE_LAYERS, BASE_RANKS = 8, 2


@dataclass(frozen=True)
class Point:
    """One model on one number of ranks.

    Attributes:
        layers: Of the GPT.
        ranks: Processes.
        parameters: Of the whole model.
        peaks: By contestant: MiB of the rank that needs most, over what importing torch takes, for each run.
        failures: By contestant, where it could not run.
    """

    layers: int
    ranks: int
    parameters: int
    peaks: dict[str, list[float]]
    failures: dict[str, str]

    def lowest(self, name: str) -> float | None:
        """The lowest run of a contestant."""
        return min(self.peaks[name], default=None)

    @property
    def ratio(self) -> float | None:
        """Our peak over the lower one of FSDP2's two forms."""
        ours = self.lowest(OURS)
        theirs = [peak for name in (THEIRS, THEIRS_TUNED) if (peak := self.lowest(name)) is not None]
        return None if ours is None or not theirs else ours / min(theirs)


def measure(layers: int, ranks: int, *, repeats: int, report_progress: Any) -> Point:
    """Trains every contestant ``repeats`` times in fresh processes."""
    workload = gpt(layers, ranks)
    parameters = sum(parameter.numel() for parameter in workload.build().parameters())
    peaks: dict[str, list[float]] = {name: [] for name in ENTRIES}
    failures: dict[str, str] = {}
    for _ in range(repeats):
        for name in ENTRIES:
            with Arena(workload, [CONTESTANTS[name]], peer_python=None, report_progress=report_progress) as arena:
                arena.run_rounds(rounds=1, steps=3, warmup=4)
            result = arena.results[name]
            if result.failure:
                failures[name] = result.failure.splitlines()[0]
                continue
            peaks[name].append(result.memory["steady_peak_mib"] - result.memory["imported_mib"])
    return Point(layers, ranks, parameters, peaks, failures)


def table(points: list[Point]) -> list[str]:
    """Markdown lines."""
    lines = [
        "| layers | parameters | ranks | ours | FSDP2 | FSDP2, our malloc settings | ours / FSDP2 | spread |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in points:
        cells = [f"{peak:.0f}" if (peak := point.lowest(name)) is not None else "failed" for name in ENTRIES]
        ratio = "" if point.ratio is None else f"{point.ratio:.2f}"
        spread = max((max(p) - min(p) for p in point.peaks.values() if p), default=0.0)
        numbers = [
            str(point.layers),
            f"{point.parameters / 1e6:.1f}M",
            str(point.ranks),
            *cells,
            ratio,
            f"{spread:.0f}",
        ]
        lines.append(f"| {' | '.join(numbers)} |")
    return lines


# -- the picture -----------------------------------------------------------------------------------------------------

_COLOURS = {OURS: "#1b6ca8", THEIRS: "#c8553d", THEIRS_TUNED: "#e0a458"}
_LABELS = {OURS: "this project, ZeRO 3", THEIRS: "FSDP2", THEIRS_TUNED: "FSDP2, our malloc settings"}
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 300, 60, 46, 40


def _panel(title: str, axis: str, values: list[tuple[float, Point]], shift: int) -> list[str]:
    """One curve per contestant over ``values`` (position on the x axis and the point), as SVG elements."""
    highest = max(point.lowest(name) or 0.0 for _, point in values for name in ENTRIES) * 1.1
    last = max(x for x, _ in values)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            shift + _LEFT + (_WIDTH - _LEFT - 20) * x / last,
            _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * y / highest,
        )

    origin, right = at(0, 0), at(last, 0)
    made = [
        f'<text x="{shift + _WIDTH / 2}" y="20" text-anchor="middle" font-weight="bold">{title}</text>',
        f'<line x1="{origin[0]}" y1="{origin[1]}" x2="{right[0]}" y2="{right[1]}" stroke="#444"/>',
        f'<line x1="{origin[0]}" y1="{origin[1]}" x2="{origin[0]}" y2="{_TOP}" stroke="#444"/>',
        f'<text x="{shift + _WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{axis}</text>',
    ]
    step = 10 ** (len(str(int(highest))) - 1) / (2 if highest < 3 * 10 ** (len(str(int(highest))) - 1) else 1)
    mark = 0.0
    while mark <= highest:
        x, y = at(0, mark)
        made.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{mark:.0f}</text>')
        made.append(f'<line x1="{x}" y1="{y}" x2="{right[0]}" y2="{y}" stroke="#ddd"/>')
        mark += step
    for x_value, _ in values:
        x, y = at(x_value, 0)
        made.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{x_value:g}</text>')
    for name in ENTRIES:
        places = [at(x, peak) for x, point in values if (peak := point.lowest(name)) is not None]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        made.append(f'<polyline points="{path}" fill="none" stroke="{_COLOURS[name]}" stroke-width="2"/>')
        made += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_COLOURS[name]}"/>' for x, y in places]
    return made


def picture(by_ranks: list[Point], by_size: list[Point]) -> str:
    """Both curves side by side, as an SVG document."""
    size = [(round(point.parameters / 1e6, 1), point) for point in by_size]
    made = _panel(f"{BASE_LAYERS} layers", "ranks", [(point.ranks, point) for point in by_ranks], 0)
    made += _panel(f"{BASE_RANKS} ranks", "million parameters", size, _WIDTH)
    for number, name in enumerate(ENTRIES):
        x = 80 + 260 * number
        made.append(f'<rect x="{x}" y="{_HEIGHT + 6}" width="12" height="12" fill="{_COLOURS[name]}"/>')
        made.append(f'<text x="{x + 18}" y="{_HEIGHT + 16}">{_LABELS[name]}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _WIDTH}" height="{_HEIGHT + 30}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(made)
        + "\n</svg>\n"
    )


# -- the command -----------------------------------------------------------------------------------------------------


def report(by_ranks: list[Point], by_size: list[Point], date: str, repeats: int, verdict: str) -> str:
    """The dated report as Markdown."""
    facts = hardware()
    lines = [
        f"# Peak memory per rank, {date}",
        "",
        f"{facts['cpu']}, {facts['logical_cores']} logical cores, {facts['memory_gib']} GiB, {facts['system']}; torch "
        f"{torch.__version__}, gloo, one thread per rank. Lowest of {repeats} run(s) each.",
        "",
        "Peak of resident memory in steady training (the kernel's `VmHWM`, reset after four steps), of the rank that",
        "needs most, over what importing torch takes, in MiB. GPT of width 512, sequence 128, micro-batch 2, AdamW, no",
        "accumulation. FSDP2: fp32 shards, `MixedPrecisionPolicy(bf16, bf16)`, `fully_shard` per block and root. Ours:",
        "ZeRO 3, bf16 compute and reduction, fp32 masters, `stage3_param_persistence_threshold: 0`.",
        "",
        f"![curves](memory-{date}.svg)",
        "",
        "## Against the number of ranks",
        "",
        *table(by_ranks),
        "",
        "## Against the size of the model",
        "",
        *table(by_size),
        "",
        f"Goal, peak not above FSDP2's (the lower of its two forms): {verdict}.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Measures, prints the tables, and writes the report if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=2, help="runs per point and contestant (default 2)")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of ranks, the points of the first curve"
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", default=list(LAYERS), help="numbers of layers, the points of the second curve"
    )
    parser.add_argument(
        "--write-report", action="store_true", help="write benchmarks/results/memory-DATE.{md,json,svg}"
    )
    parser.add_argument("--keep", type=Path, help="JSON file of points; those in it are not measured again")
    parser.add_argument("--check", action="store_true", help="exit with code 1 where our peak is above FSDP2's")
    arguments = parser.parse_args()
    kept: Path | None = arguments.keep
    points = [Point(**entry) for entry in json.loads(kept.read_text())] if kept is not None and kept.exists() else []
    known = {(each.layers, each.ranks): each for each in points}

    def point(layers: int, ranks: int) -> Point:
        if (layers, ranks) not in known:
            known[layers, ranks] = measure(
                layers, ranks, repeats=arguments.repeats, report_progress=lambda line: sys.stderr.write(f"{line}\n")
            )
            if kept is not None:
                kept.write_text(json.dumps([vars(each) for each in known.values()]))
        return known[layers, ranks]

    by_ranks = [point(BASE_LAYERS, ranks) for ranks in arguments.ranks]
    by_size = [point(layers, BASE_RANKS) for layers in arguments.layers]
    above = [p for p in known.values() if p.ratio is None or p.ratio > 1.0]
    verdict = (
        "met at every point"
        if not above
        else "missed at " + ", ".join(f"{p.layers} layers on {p.ranks} rank(s)" for p in above)
    )
    date = datetime.date.today().isoformat()
    text = report(by_ranks, by_size, date, arguments.repeats, verdict)
    sys.stdout.write(text)
    if arguments.write_report:
        results = _HERE / "results"
        (results / f"memory-{date}.md").write_text(text)
        (results / f"memory-{date}.svg").write_text(picture(by_ranks, by_size))
        raw = {"hardware": hardware(), "torch": torch.__version__, "points": [vars(p) for p in known.values()]}
        (results / f"memory-{date}.json").write_text(json.dumps(raw, indent=1) + "\n")
    return 1 if arguments.check and above else 0


if __name__ == "__main__":
    sys.exit(main())
