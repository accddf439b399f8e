"""``ds_trace``: one trace of all ranks, or what differs between two traces."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepspeed.cli.command import run_command
from deepspeed.profiling.trace_files import compare_traces, merge_traces

_LINES = 20


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


if __name__ == "__main__":
    main()
