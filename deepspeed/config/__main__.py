"""``python -m deepspeed.config``: checks a file, or writes the schema or the reference page."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepspeed.command_output import run_and_flush
from deepspeed.config.comparing import compared_keys, removed_keys
from deepspeed.config.degrees import data_parallel_size
from deepspeed.config.parsing import ParsedConfig, parse
from deepspeed.config.reference import reference_text
from deepspeed.config.schema import schema_text
from deepspeed.config.source import is_readable
from deepspeed.errors import DeepSpeedConfigError


def _check(source: str, world_size: int | None, console: Console) -> int:
    if not is_readable(source):
        reason = f"{source} is a folder; give a file" if os.path.isdir(source) else f"there is no file {source}"
        console.print(f"[red]{escape(reason)}[/]", soft_wrap=True)
        return 1
    try:
        ranks = None if world_size is None else lambda root: data_parallel_size(root, world_size)
        parsed = parse(source, dp_world_size=ranks)
    except DeepSpeedConfigError as error:
        count = len(error.problems)
        console.print(f"[red]{escape(source)}: {count} problem{'s' if count != 1 else ''}[/]", soft_wrap=True)
        for number, problem in enumerate(error.problems, 1):
            console.print(f"  {number}. {escape(problem)}", soft_wrap=True, highlight=False)
        return 1
    _show(source, parsed, console)
    return 0


def _compare(source: str, console: Console) -> int:
    if not is_readable(source):
        return _check(source, None, console)
    for name, comparison in compared_keys(source):
        console.print(f"{escape(name)}: {escape(comparison)}", soft_wrap=True, highlight=False)
    return 0


def _show(source: str, parsed: ParsedConfig, console: Console) -> None:
    root = parsed.root
    console.print(f"[green]{escape(source)} is in order[/]", soft_wrap=True)
    for notice in parsed.notices:
        console.print(f"  - {escape(notice)}", soft_wrap=True, highlight=False)
    for name, release in removed_keys(parsed.raw).items():
        console.print(f"  - {escape(name)}: removed in {release}, works here", soft_wrap=True, highlight=False)
    table = Table(show_header=False, box=None)
    precision = "fp16" if root.fp16.enabled else "bf16" if root.bf16.enabled else "fp32"
    table.add_row("ZeRO stage", str(root.zero_optimization.stage))
    table.add_row("precision", precision + (" under torch.autocast" if root.torch_autocast.enabled else ""))
    table.add_row("optimizer", (root.optimizer.type if root.optimizer else None) or "the client's")
    table.add_row("schedule", (root.scheduler.type if root.scheduler else None) or "the client's, or none")
    if parsed.batch is not None:
        batch = parsed.batch
        number = batch.train_batch_size // batch.micro_batch_size
        shares = (
            f"{number} micro-batches, at most {batch.accumulation_steps} a rank"
            if batch.is_uneven
            else f"accumulation {batch.accumulation_steps} x {batch.data_ranks} ranks"
        )
        table.add_row("batch", f"{batch.train_batch_size} = micro-batch {batch.micro_batch_size} x {shares}")
    else:
        table.add_row("batch", "give --world-size to have it checked in full")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 1 when the file has problems."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed.config", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check a configuration file")
    check.add_argument("file", help="configuration file (JSON or Hjson)")
    check.add_argument("--world-size", type=int, help="number of ranks of the job, for the batch arithmetic")
    check.add_argument(
        "--from-upstream",
        action="store_true",
        help="print one line per key: how it compares with the original package, and what is refused here",
    )
    commands.add_parser("schema", help="write the JSON Schema to standard output")
    commands.add_parser("reference", help="write the reference page to standard output")
    given = parser.parse_args(arguments)
    if given.command == "check":
        if given.world_size is not None and given.world_size < 1:
            parser.error(f"--world-size must be at least 1, found {given.world_size}")
        if given.from_upstream:
            return _compare(given.file, Console())
        return _check(given.file, given.world_size, Console())
    sys.stdout.write(schema_text() if given.command == "schema" else reference_text())
    return 0


def run() -> None:
    """Runs the command of this process, and exits with its code."""
    sys.exit(run_and_flush("python -m deepspeed.config", main))


if __name__ == "__main__":
    run()
