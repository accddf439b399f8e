"""``ds_trace``: puts the traces of all ranks into one file, or shows what differs between two traces."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deepspeed.cli.command import run_command
from deepspeed.errors import DeepSpeedError
from deepspeed.profiling.step_trace import PATTERN

_LINES = 20
_PER_RANK = 1_000_000
"""Process numbers of rank n in the merged trace begin at n times this."""
_STEP = re.compile(r"step \d+$")


def main(args: Sequence[str] | None = None) -> None:
    """Merges the traces of a run, or compares those of two.

    Args:
        args: The command line without the command; None: the process's.

    Raises:
        DeepSpeedError: A folder holds no trace, and ``args`` was given.
    """
    run_command("ds_trace", lambda: _run(parse_args(args)), args)


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="ds_trace",
        description="Puts the traces of all ranks (trace.path in the configuration) into one Chrome trace for "
        "ui.perfetto.dev; with --diff, prints which operations take a different time in the second of two traces.",
    )
    parser.add_argument("folder", type=Path, nargs="?", help="trace.path of a run")
    parser.add_argument(
        "-o", "--output", type=Path, help="file for the merged trace (default: trace.json in the folder)"
    )
    parser.add_argument("--diff", type=Path, nargs=2, metavar=("A", "B"), help="folders or merged traces to compare")
    parser.add_argument("--lines", type=int, default=_LINES, help=f"number of lines of the comparison ({_LINES})")
    options = parser.parse_args(args)
    if (options.folder is None) == (options.diff is None):
        parser.error("give either a folder or --diff A B")
    return options


def _run(options: argparse.Namespace) -> None:
    if options.diff is None:
        sys.stdout.write(f"{merge_traces(options.folder, options.output)}\n")
        return
    table = Table("range or operation", title="milliseconds per step and rank, largest change first")
    for title in ("A", "B", "B - A"):
        table.add_column(title, justify="right")
    for change in compare_traces(*options.diff)[: options.lines]:
        difference = change.after - change.before
        table.add_row(change.name, f"{change.before:,.3f}", f"{change.after:,.3f}", f"{difference:+,.3f}")
    Console().print(table)


@dataclass(frozen=True)
class TraceRow:
    """One name in two traces.

    Attributes:
        name: Of a range or an operation.
        before: Milliseconds per step and rank in the first trace.
        after: The same in the second.
    """

    name: str
    before: float
    after: float


def merge_traces(folder: Path, target: Path | None = None) -> Path:
    """Writes one Chrome trace with a process for each rank, for Perfetto or ``chrome://tracing``; returns its path.

    Args:
        folder: ``trace.path`` of a run. Folders of several nodes may be copied into one.
        target: The file; None: ``trace.json`` in the folder.

    Raises:
        DeepSpeedError: There is no trace of a rank, or a file is no trace.
    """
    merged: list[dict[str, Any]] = []
    for path in _paths(folder):
        rank = int(path.name.removeprefix("rank-").partition(".")[0])
        trace = _read(path)
        base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3  # microseconds, by the host's clock
        merged += [_of_rank(event, rank, base) for event in trace["traceEvents"]]
    start = min((event["ts"] for event in merged if event.get("ph") != "M" and "ts" in event), default=0.0)
    for event in merged:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start, 3)
    target = folder / "trace.json" if target is None else target
    target.write_text(json.dumps({"traceEvents": merged}), encoding="utf-8")
    return target


def compare_traces(before: Path, after: Path) -> list[TraceRow]:
    """Returns what takes another time per step, largest change first. Times of ranges include those inside them.

    Args:
        before: A folder of traces, or a merged trace.
        after: Another one.

    Raises:
        DeepSpeedError: One of them is no trace, or holds no step.
    """
    first, second = _times(before), _times(after)
    changes = [TraceRow(name, first.get(name, 0.0), second.get(name, 0.0)) for name in {*first, *second}]
    return sorted(changes, key=lambda change: (-abs(change.after - change.before), change.name))


def _paths(folder: Path) -> list[Path]:
    paths = sorted(folder.glob(PATTERN))
    if not paths:
        raise DeepSpeedError(
            f"{folder}: expected files {PATTERN}, which a run with trace.path writes; found none. Give the folder that "
            "the configuration named, after the traced steps are done"
        )
    return paths


def _read(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        trace["traceEvents"][:1]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeepSpeedError(f"{path}: expected a Chrome trace, found: {error}. Trace the run again") from error
    return trace  # type: ignore[no-any-return]


def _of_rank(event: dict[str, Any], rank: int, base: float) -> dict[str, Any]:
    made = dict(event)
    if "ts" in made:
        made["ts"] = float(made["ts"]) + base
    process = made.get("pid")
    if isinstance(process, int):
        made["pid"] = rank * _PER_RANK + process % _PER_RANK
        if made.get("name") == "process_name":
            made["args"] = {"name": f"rank {rank}: {made.get('args', {}).get('name', '')}"}
    elif process is not None:
        made["pid"] = f"rank {rank}: {process}"
    if made.get("ph") in ("s", "f", "t") and "id" in made:  # arrows between launches and kernels stay in their rank
        made["id"] = f"{rank}/{made['id']}"
    return made


def _times(place: Path) -> dict[str, float]:
    """Returns the milliseconds per step and rank of the events of a trace, by event name."""
    events: Iterable[dict[str, Any]]
    if place.is_dir():
        events = [event for path in _paths(place) for event in _read(path)["traceEvents"]]
    else:
        events = _read(place)["traceEvents"]
    total: dict[str, float] = defaultdict(float)
    steps = 0
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("user_annotation", "kernel", "cpu_op", "gpu_memcpy"):
            is_step = _STEP.match(event["name"]) is not None and event["cat"] == "user_annotation"
            steps += is_step
            total["step" if is_step else event["name"]] += float(event.get("dur", 0.0)) / 1e3
    if not steps:
        raise DeepSpeedError(f"{place}: expected ranges named step 1, step 2 and so on; found none. Trace whole steps")
    return {name: time / steps for name, time in total.items()}


if __name__ == "__main__":
    main()
