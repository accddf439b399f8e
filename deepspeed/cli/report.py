"""``ds_report``: shows what is installed, the devices of this machine, and which features work on it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from deepspeed.cli.environment_info import EnvironmentInfo, FeatureStatus, collect

# Wide enough for a path; a terminal's own width wins.
_WIDTH_WITHOUT_TERMINAL = 120
_COLOURS = {"yes": "green", "slow": "yellow", "no": "red"}


def main(args: Sequence[str] | None = None) -> None:
    """Prints the report.

    Args:
        args: The command line; None means that of this process.
    """
    options = _parse_args(args)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_WITHOUT_TERMINAL)
    show(collect(), console, features=not options.hide_operator_status, warnings=not options.hide_errors_and_warnings)


def _parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ds_report", description=__doc__, allow_abbrev=False)
    parser.add_argument("--hide_operator_status", action="store_true", help="leave out the list of what can be used")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="leave out the warnings")
    return parser.parse_args(args)


def show(facts: EnvironmentInfo, console: Console, *, features: bool = True, warnings: bool = True) -> None:
    """Prints ``facts`` as tables.

    Args:
        facts: What was found.
        console: Where to.
        features: Include what can be used here and what this release does not have.
        warnings: Include the warnings.
    """
    if features:
        console.print(_usable(facts.usable))
    if warnings:
        for sentence in facts.warnings:
            console.print(Text(f"warning: {sentence}", style="yellow"))
    console.print(_pairs("This machine", facts.machine))
    console.print(_pairs("Versions", facts.versions))
    if features:
        console.print(_pairs("Not in this release, and what to do instead", facts.missing))


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, min_width=60)
    table.add_column(style="bold", no_wrap=False, max_width=52)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _usable(rows: Iterable[FeatureStatus]) -> Table:
    table = Table(title="What can be used here", title_justify="left", min_width=60)
    for heading in ("feature", "usable", "why"):
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(Text(row.feature), Text(row.verdict, style=_COLOURS[row.verdict]), Text(row.reason))
    return table


if __name__ == "__main__":
    main()
