"""Shows and writes what was measured: rich tables, JSON, a dated Markdown report."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from contest.arena import Result
from contest.contestants import ADAMW, CONTESTANTS, engine_config, zero_section
from contest.goals import LOSS_TOLERANCE, Verdict, judge, loss_distance
from contest.workloads import WORKLOADS

Rows = tuple[list[str], list[list[str]]]  # header, body


@dataclass(frozen=True)
class Contest:
    """The results of one workload, by contestant."""

    workload: str
    results: Mapping[str, Result]

    @property
    def verdicts(self) -> list[Verdict]:
        """Returns the verdicts on the pairs with goals."""
        return judge(self.workload, self.results)

    @property
    def reference(self) -> Result | None:
        """Returns the contestant whose losses the others are compared with."""
        for name in ("ddp-bf16", "hand", "fsdp2"):
            if name in self.results and not self.results[name].failure:
                return self.results[name]
        return None


def load() -> float:
    """Returns the load average of the last minute. Times measured after a start above 0.5 are unreliable."""
    return round(os.getloadavg()[0], 2)


def hardware() -> dict[str, Any]:
    """Returns a description of the machine, without its host name."""
    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "logical_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_at_start": load(),
    }


def times_table(contest: Contest) -> Rows:
    """Returns the table of absolute figures of every contestant."""
    header = [
        "contestant",
        "ms/step",
        "quartiles",
        "fastest",
        "cpu ms",
        "samples/s",
        "MB/step",
        "peak MiB",
        "over import",
        "loss",
        "idle cpu",
    ]
    body = []
    workload = WORKLOADS[contest.workload]
    for result in contest.results.values():
        if result.failure:
            body.append([result.name, "failed", *[""] * (len(header) - 2)])
            continue
        lower, upper = result.quartiles
        peak = result.memory["steady_peak_mib"]
        traffic = "" if result.bytes_per_step is None else f"{result.bytes_per_step / 1e6:.1f}"
        body.append(
            [
                result.name,
                f"{result.median * 1e3:.1f}",
                f"{lower * 1e3:.1f}-{upper * 1e3:.1f}",
                f"{result.fastest * 1e3:.1f}",
                f"{statistics.median(result.cpu_seconds) * 1e3:.1f}",
                f"{workload.samples * workload.world_size / result.median:.0f}",
                traffic,
                f"{peak:.0f}",
                f"{peak - result.memory['imported_mib']:.0f}",
                _loss_words(result, contest.reference),
                f"{result.idle_share:.1%}",
            ]
        )
    return header, body


def _loss_words(result: Result, reference: Result | None) -> str:
    last = f"{result.losses[-1]:.3f}"
    if reference is None or result is reference or result.name in ("floor", "floor-0", "hand", "autocast"):
        return last
    distance = loss_distance(result, reference)
    return f"{last} ({distance:.0e}{', DIFFERS' if distance > LOSS_TOLERANCE else ''})"


def ratios_table(contest: Contest) -> Rows:
    """Returns the table of ratios of step time and memory, with the goals."""
    header = [
        "pair",
        "time",
        "rounds' quartiles",
        "fastest",
        "cpu",
        "goal",
        "verdict",
        "peak memory",
        "memory over import",
    ]
    body = []
    for verdict in contest.verdicts:
        goal = verdict.goal
        body.append(
            [
                f"{goal.ours} / {goal.other}",
                f"{verdict.ratio:.2f}",
                f"{verdict.spread[0]:.2f}-{verdict.spread[1]:.2f}",
                f"{verdict.fastest:.2f}",
                f"{verdict.cpu:.2f}",
                "" if goal.at_most is None else f"<= {goal.at_most:.2f}",
                verdict.words,
                f"{verdict.memory:.2f}",
                f"{verdict.memory_above_import:.2f}",
            ]
        )
    return header, body


def show(console: Console, contest: Contest) -> None:
    """Prints both tables of a contest and the reasons of failures."""
    for title, (header, body) in (
        (WORKLOADS[contest.workload].title, times_table(contest)),
        ("ratios", ratios_table(contest)),
    ):
        if not body:
            continue
        table = Table(title=title, title_justify="left")
        for index, name in enumerate(header):
            table.add_column(name, justify="left" if index == 0 else "right")
        for row in body:
            style = "red" if any(cell.startswith(("missed", "failed")) or "DIFFERS" in cell for cell in row) else None
            table.add_row(*row, style=style)
        console.print(table)
    for result in contest.results.values():
        if result.failure:
            console.print(result.failure, style="red", markup=False, highlight=False)


def as_dict(contests: list[Contest], facts: dict[str, Any]) -> dict[str, Any]:
    """Returns all measurements for JSON; the keys name the units."""
    return {
        **facts,
        "workloads": {
            contest.workload: {
                "results": {name: dataclasses.asdict(result) for name, result in contest.results.items()},
                "ratios": [
                    {**dataclasses.asdict(verdict), "met": verdict.met, "verdict": verdict.words}
                    for verdict in contest.verdicts
                ],
            }
            for contest in contests
        },
    }


def write(folder: Path, contests: list[Contest], facts: dict[str, Any], name: str = "zero") -> Path:
    """Writes ``NAME-DATE.md`` and ``NAME-DATE.json``; returns the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{name}-{facts['date']}"
    stem.with_suffix(".json").write_text(json.dumps(as_dict(contests, facts), indent=1) + "\n")
    lines = [f"# ZeRO benchmark, {facts['date']}", "", "```json", json.dumps(facts, indent=1), "```", ""]
    for contest in contests:
        lines += [f"## {WORKLOADS[contest.workload].title}", ""]
        lines += [*_markdown(times_table(contest)), "", *_markdown(ratios_table(contest)), ""]
        failures = [result.failure for result in contest.results.values() if result.failure]
        lines += [line for failure in failures for line in ("```", failure, "```", "")]
    entered = dict.fromkeys(name for contest in contests for name in contest.results)
    lines += ["## Contestants", "", *(f"- **{name}**: {CONTESTANTS[name].about}" for name in entered), ""]
    lines += [
        "Columns: MB/step is payload that arrived on TCP sockets, all ranks together; memory is the highest rank's",
        "peak of resident memory in steady training, in a fresh process; loss is the last step's mean over ranks and,",
        "in brackets, the largest relative difference over ten steps; idle cpu is processor time while paused.",
        "",
    ]
    path = stem.with_suffix(".md")
    path.write_text("\n".join(lines))
    return path


def _markdown(rows: Rows) -> list[str]:
    header, body = rows
    return [" | ".join(["", *cells, ""]).strip() for cells in (header, ["---"] * len(header), *body)] if body else []


def settings(*, rounds: int, steps: int, warmup: int) -> dict[str, Any]:
    """Returns the settings of the run."""
    return {
        "rounds": rounds,
        "timed_steps_per_round": steps,
        "warmup_steps": warmup,
        "threads_per_rank": 1,
        "backend": "gloo",
        "adamw": ADAMW,
        "ds_config_of_stage_3": engine_config(zero_section(3), 1),
    }
