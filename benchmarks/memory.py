"""Measures peak memory per rank beside FSDP2: over the number of ranks, and over the size of the model.

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
from contest.curves import Panel, draw_panels
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
        layers: Number of layers of the GPT.
        ranks: Number of ranks.
        parameters: Number of parameters of the model.
        peaks: By contestant and run: MiB of the rank with the highest peak, without those of ``import torch``.
        failures: By contestant that could not run: why.
    """

    layers: int
    ranks: int
    parameters: int
    peaks: dict[str, list[float]]
    failures: dict[str, str]

    def lowest(self, name: str) -> float | None:
        """Returns the lowest peak of a contestant; None: it could not run."""
        return min(self.peaks[name], default=None)

    @property
    def ratio(self) -> float | None:
        """Returns our peak divided by the lower one of FSDP2's two forms; None: one side could not run."""
        ours = self.lowest(OURS)
        theirs = [peak for name in (THEIRS, THEIRS_TUNED) if (peak := self.lowest(name)) is not None]
        return None if ours is None or not theirs else ours / min(theirs)


def measure(layers: int, ranks: int, *, repeats: int, report_progress: Any) -> Point:
    """Trains every contestant ``repeats`` times in fresh processes and returns their peaks."""
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
    """Returns the table of some points, in Markdown."""
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


_LABELS = {OURS: "this project, ZeRO 3", THEIRS: "FSDP2", THEIRS_TUNED: "FSDP2, our malloc settings"}


def _curves(points: list[Point], x: list[float]) -> dict[str, tuple[list[float], list[float]]]:
    """Returns by contestant its lowest peaks over ``x``, without those that could not run."""
    found = {}
    for name in ENTRIES:
        pairs = [(at, peak) for at, point in zip(x, points, strict=True) if (peak := point.lowest(name)) is not None]
        found[_LABELS[name]] = [at for at, _ in pairs], [peak for _, peak in pairs]
    return found


def picture(path: Path, by_ranks: list[Point], by_size: list[Point]) -> None:
    """Draws both curves side by side."""
    sizes = [point.parameters / 1e6 for point in by_size]
    of_ranks, of_sizes = _curves(by_ranks, [point.ranks for point in by_ranks]), _curves(by_size, sizes)
    panels = [
        Panel("ranks", "MiB", of_ranks, f"{BASE_LAYERS} layers"),
        Panel("million parameters", "MiB", of_sizes, f"{BASE_RANKS} ranks"),
    ]
    draw_panels(path, panels, marker="o")


def report(by_ranks: list[Point], by_size: list[Point], date: str, repeats: int, verdict: str) -> str:
    """Returns the report as Markdown."""
    facts = hardware()
    lines = [
        f"# Peak memory per rank, {date}",
        "",
        f"{facts['cpu']}, {facts['logical_cores']} logical cores, {facts['memory_gib']} GiB, {facts['system']}; torch "
        f"{torch.__version__}, gloo, one thread per rank. Lowest of {repeats} run(s) each.",
        "",
        "Peak of resident memory in steady training (the kernel's `VmHWM`, reset after five steps), of the rank with",
        "the highest peak, without that of `import torch`, in MiB. GPT of width 512, sequence 128, micro-batch 2,",
        "AdamW, no accumulation. FSDP2: fp32 shards, `MixedPrecisionPolicy(bf16, bf16)`, `fully_shard` per block and",
        "root. Ours: ZeRO 3, bf16 compute and reduction, fp32 masters, `stage3_param_persistence_threshold: 0`.",
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
    parser.add_argument("--points", type=Path, help="JSON file of points: those in it are not measured again")
    parser.add_argument("--check", action="store_true", help="exit with code 1 where our peak is above FSDP2's")
    arguments = parser.parse_args()
    file: Path | None = arguments.points
    points = [Point(**entry) for entry in json.loads(file.read_text())] if file is not None and file.exists() else []
    known = {(each.layers, each.ranks): each for each in points}

    def point(layers: int, ranks: int) -> Point:
        if (layers, ranks) not in known:
            known[layers, ranks] = measure(
                layers, ranks, repeats=arguments.repeats, report_progress=lambda line: sys.stderr.write(f"{line}\n")
            )
            if file is not None:
                file.write_text(json.dumps([vars(each) for each in known.values()]))
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
        picture(results / f"memory-{date}.svg", by_ranks, by_size)
        raw = {"hardware": hardware(), "torch": torch.__version__, "points": [vars(p) for p in known.values()]}
        (results / f"memory-{date}.json").write_text(json.dumps(raw, indent=1) + "\n")
    return 1 if arguments.check and above else 0


if __name__ == "__main__":
    sys.exit(main())
