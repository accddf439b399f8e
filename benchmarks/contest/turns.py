"""Processes that stay alive and compute once at each request."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

Processes = Sequence["subprocess.Popen[str]"]


def take_turn(processes: Processes, why_ended: Callable[[], str] = lambda: "") -> list[Any]:
    """Tells all of them to compute once, and waits for what each has found.

    Args:
        processes: Each reads a line ``go`` and answers with one line that is a JSON list of figures; other lines that
            it prints are passed over.
        why_ended: What else to say where one has ended.

    Returns:
        Their lists.
    """
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [json.loads(_answer(process, why_ended)) for process in processes]


def _answer(process: subprocess.Popen[str], why_ended: Callable[[], str]) -> str:
    assert process.stdout is not None
    while True:
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"a contestant ended: {process.args}; {why_ended()}")
        if line.startswith("[") and line.rstrip().endswith("]") and line[1].isdigit():
            return line


def dismiss(processes: Processes) -> None:
    """Ends all of them with an empty line, and waits until they are gone."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.close()
    for process in processes:
        process.wait()
