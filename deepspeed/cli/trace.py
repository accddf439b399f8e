"""``ds_trace``: merges the traces of all ranks into one file, or compares two traces."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
"""Process ids of rank n in the merged trace start at n times this."""
_WHOLE_STEP, _WAITS = "whole step", "waits"
_PHASES = {"forward": "forward", "backward": "backward", "step": "update", "schedule": "schedule of the stage"}
_STEP = re.compile(r"step \d+$")


def main(args: Sequence[str] | None = None) -> None:
    """Merges the traces of a run, or compares those of two."""
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
    if options.diff is not None and options.output is not None:
        parser.error("--output is the file of a merged trace, which --diff does not write; leave it out")
    return options


def _run(options: argparse.Namespace) -> None:
    if options.diff is None:
        sys.stdout.write(f"{merge_traces(options.folder, options.output)}\n")
        return
    sentence = describe_change(*options.diff)
    Console().print(sentence, highlight=False, markup=False, soft_wrap=True)
    table = Table("range or operation", title="milliseconds per step and rank, largest change first")
    for title in ("A", "B", "B - A"):
        table.add_column(title, justify="right")
    for change in compare_traces(*options.diff)[: options.lines]:
        difference = change.after - change.before
        table.add_row(change.name, f"{change.before:,.3f}", f"{change.after:,.3f}", f"{difference:+,.3f}")
    Console().print(table)


@dataclass(frozen=True)
class TraceRow:
    """The times of one name in two traces."""

    name: str  # the name of a range or an operation
    before: float  # milliseconds per step and rank in the first trace
    after: float  # the same in the second


def merge_traces(folder: Path, target: Path | None = None) -> Path:
    """Writes one Chrome trace with a process for each rank, for Perfetto or ``chrome://tracing``; returns its path.

    Args:
        folder: ``trace.path`` of a run. Folders of several nodes may be copied into one.
        target: The file; None: ``trace.json`` in the folder.

    Raises:
        DeepSpeedError: There is no trace of a rank, a file is no trace, or the target cannot be written.
    """
    merged: list[dict[str, Any]] = []
    for path in _paths(folder):
        rank = _rank_of(path)
        trace = _read(path)
        base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3  # microseconds, by the host's clock
        merged += [shown for event in trace["traceEvents"] for shown in _as_async(_of_rank(event, rank, base))]
    start = min((event["ts"] for event in merged if event.get("ph") != "M" and "ts" in event), default=0.0)
    for event in merged:
        if "ts" in event:
            event["ts"] = round(event["ts"] - start, 3)
    target = folder / "trace.json" if target is None else target
    try:
        target.write_text(json.dumps({"traceEvents": merged}), encoding="utf-8")
    except OSError as error:
        raise DeepSpeedError(f"{target}: cannot be written ({error.strerror}); choose another file") from error
    return target


def compare_traces(before: Path, after: Path) -> list[TraceRow]:
    """Returns names of two traces whose time per step differs, largest change first; includes nested ranges.

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
        if not all(isinstance(event, dict) for event in trace["traceEvents"]):
            raise TypeError("events that are no objects")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DeepSpeedError(f"{path}: expected a Chrome trace, found: {error}. Trace the run again") from error
    return trace  # type: ignore[no-any-return]


def _of_rank(event: dict[str, Any], rank: int, base: float) -> dict[str, Any]:
    copy = dict(event)
    if "ts" in copy:
        copy["ts"] = float(copy["ts"]) + base
    process = copy.get("pid")
    if isinstance(process, int):
        copy["pid"] = rank * _PER_RANK + process % _PER_RANK
        if copy.get("name") == "process_name":
            copy["args"] = {"name": f"rank {rank}: {copy.get('args', {}).get('name', '')}"}
    elif process is not None:
        copy["pid"] = f"rank {rank}: {process}"
    if copy.get("ph") in ("s", "f", "t") and "id" in copy:  # arrows between launches and kernels stay in their rank
        copy["id"] = f"{rank}/{copy['id']}"
    return copy


def _is_collective_of_gloo(event: Mapping[str, Any]) -> bool:
    """Returns whether an event is torch's record of an asynchronous operation of gloo.

    It begins in one thread and ends in another, so it overlaps ranges of its thread. The wait for it is a separate
    range *wait*.
    """
    return event.get("ph") == "X" and str(event.get("name")).startswith("gloo:")


def _as_async(event: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events that replace an event for viewers: an asynchronous operation gets a separate track."""
    if not _is_collective_of_gloo(event):
        return [event]
    begin = {**event, "ph": "b", "id": f"{event['pid']}/{event['tid']}/{event['ts']}"}
    length = begin.pop("dur", 0.0)
    return [begin, {**begin, "ph": "e", "ts": event["ts"] + length}]


def _events(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a folder of traces, with process ids that encode the rank, or of a merged trace."""
    if path.is_dir():
        return [_of_rank(event, _rank_of(file), 0.0) for file in _paths(path) for event in _read(file)["traceEvents"]]
    return list(_read(path)["traceEvents"])


def _rank_of(path: Path) -> int:
    return int(path.name.removeprefix("rank-").partition(".")[0])


def _times(path: Path) -> dict[str, float]:
    """Returns the milliseconds per step and rank of the events of a trace, by event name."""
    total: dict[str, float] = defaultdict(float)
    steps = 0
    for event in _events(path):
        if event.get("ph") != "X" or event.get("cat") not in ("user_annotation", "kernel", "cpu_op", "gpu_memcpy"):
            continue
        if not _is_collective_of_gloo(event):
            is_step = _is_step(event)
            steps += is_step
            total[_WHOLE_STEP if is_step else event["name"]] += float(event.get("dur", 0.0)) / 1e3
    _require_steps(path, steps)
    return {name: time / steps for name, time in total.items()}


def _is_step(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "user_annotation" and _STEP.match(str(event.get("name"))) is not None


def _require_steps(path: Path, steps: int) -> None:
    if not steps:
        raise DeepSpeedError(f"{path}: expected ranges named step 1, step 2 and so on; found none. Trace whole steps")


def describe_change(before: Path, after: Path) -> str:
    """Returns a sentence: how much longer a step takes, and in which phase of which rank, without waits.

    Raises:
        DeepSpeedError: One of them is no trace, or holds no step.
    """
    first, second = _phases(before), _phases(after)
    totals = [sum(sum(phases.values()) for phases in ranks.values()) / len(ranks) for ranks in (first, second)]
    text = f"A step takes {totals[1]:,.1f} ms, {totals[1] - totals[0]:+,.1f} ms."
    changes = [
        (phases[name] - first[rank].get(name, 0.0), rank, name)
        for rank, phases in second.items()
        if rank in first
        for name in phases
        if name != _WAITS
    ]
    most, rank, name = max(changes, default=(0.0, 0, ""))
    if most <= 0:
        return text
    waits = [sum(phases.get(_WAITS, 0.0) for phases in ranks.values()) / len(ranks) for ranks in (first, second)]
    return (
        f"{text} Largest increase by the hosts' clocks, waits for other ranks aside: {name} on rank {rank}, "
        f"{most:+,.1f} ms per step. Waits of all ranks: {waits[1] - waits[0]:+,.1f} ms per step and rank."
    )


def _phases(path: Path) -> dict[int, dict[str, float]]:
    """Returns for each rank the milliseconds per step of its phases without waits, of waits, and outside of both."""
    threads: dict[tuple[int, Any], list[dict[str, Any]]] = defaultdict(list)
    for event in _events(path):
        is_range = (
            event.get("ph") == "X" and event.get("cat") == "user_annotation" and isinstance(event.get("pid"), int)
        )
        if is_range and not _is_collective_of_gloo(event):
            threads[event["pid"], event.get("tid")].append(event)
    found: dict[int, dict[str, float]] = {}
    for (process, _), events in threads.items():
        if steps := sum(map(_is_step, events)):  # the thread of the program
            found[process // _PER_RANK] = {name: time / steps for name, time in _own_times(events).items()}
    _require_steps(path, len(found))
    return found


def _own_times(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the milliseconds of a thread's ranges by phase; of nested ranges, the inner one counts."""
    total: dict[str, float] = defaultdict(float)
    open_ranges: list[tuple[float, str]] = []  # end, phase; outermost first
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0.0))):
        start, length = float(event["ts"]), float(event.get("dur", 0.0))
        while open_ranges and open_ranges[-1][0] <= start:
            open_ranges.pop()
        if not open_ranges and not _is_step(event):
            continue
        phase = _phase_of(event, open_ranges[-1][1] if open_ranges else "")
        if open_ranges:
            length = min(length, open_ranges[-1][0] - start)
            total[open_ranges[-1][1]] -= length / 1e3
        total[phase] += length / 1e3
        open_ranges.append((start + length, phase))
    return dict(total)


def _phase_of(event: Mapping[str, Any], outer: str) -> str:
    if _is_step(event):
        return "outside the engine"
    name = str(event["name"])
    if name.startswith("wait "):
        return _WAITS
    return _PHASES.get(name, outer)


if __name__ == "__main__":
    main()
