"""Part F: compute-sanitizer over one small step at stage 3, with host offload: memory errors and races."""

from __future__ import annotations

import shutil
import subprocess
import sys

from on_gpu.part import Report, Settings, child_environment

TITLE = "F. compute-sanitizer"
# NCCL looks for functions that a driver may lack; without this the sanitizer counts each missing one as an error.
TOOLS = {"memcheck": ("--tool", "memcheck", "--report-api-errors", "no"), "racecheck": ("--tool", "racecheck")}
STEP = [sys.executable, "-m", "on_gpu.one_step"]


def run(settings: Settings, report: Report) -> None:
    """Fills the report; where the sanitizer is not installed, the step runs without it."""
    table = report.table("One step at stage 3 with host offload", ["tool", "exit code", "last line"])
    program = None if settings.dry else shutil.which("compute-sanitizer")
    if program is None:
        why = "dry run" if settings.dry else "compute-sanitizer is not installed"
        _row(settings, report, table, f"none ({why})", STEP)
        return
    for tool, options in TOOLS.items():
        _row(settings, report, table, tool, [program, *options, "--error-exitcode", "3", *STEP])


def _row(settings: Settings, report: Report, table: object, name: str, command: list[str]) -> None:
    done = subprocess.run(command, env=child_environment(settings), capture_output=True, text=True, timeout=240)
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    report.row(table, name, done.returncode, lines[-1] if lines else "")  # type: ignore[arg-type]
    if done.returncode:
        report.problem(f"{name}: {(done.stdout + done.stderr)[-800:]}")
