"""``ds_report_run``: writes the report page of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed.cli.command import run_command
from deepspeed.run_report.page import write_report


def main(args: Sequence[str] | None = None) -> None:
    """Writes ``report.html`` and ``report.json`` into the folder of a run."""
    run_command("ds_report_run", lambda: _run(args), args)


def _run(args: Sequence[str] | None) -> None:
    parser = argparse.ArgumentParser(
        prog="ds_report_run",
        description="Makes report.html and report.json from the files that a run with run_report.path wrote. The run "
        "may still be running, or have crashed.",
    )
    parser.add_argument(
        "folder", type=Path, help="run_report.path of the run; copy the files of all nodes into one folder"
    )
    sys.stdout.write(f"{write_report(parser.parse_args(args).folder)}\n")


if __name__ == "__main__":
    main()
