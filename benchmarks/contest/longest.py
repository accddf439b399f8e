"""Finds the longest sequence that trains within a memory limit, in few runs.

A run is a process of its own, which trains one step. Two short runs without a limit give a line: the bytes by which
memory grows per token. Runs with the limit (``RLIMIT_DATA``) follow, a little below and a little above the length where
the line meets it, so that a length that fits and a length that fails are both observed. The short runs succeeded, so
such a failure is one of memory. The time of attention grows with the square of the length: beyond a maximum nothing is
run, and the line alone shows how far memory would reach.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from contest.process_memory import status_bytes

STEP = 1 / 24  # of the length: how far beside the line's length the first runs are
GRAIN = 64  # lengths are multiples of this


@dataclass
class Run:
    """One run with the limit.

    Attributes:
        tokens: Of its sequence.
        error: Exit code and the last line of its output; empty: it fits.
        grown: Largest growth of its data in bytes.
        seconds: Duration, imports included.
    """

    tokens: int
    error: str
    grown: int
    seconds: float


@dataclass
class Longest:
    """Result of a search.

    Attributes:
        per_token: Bytes by which memory grows with each token, from the short runs.
        by_line: Tokens where the line of the short runs meets the limit.
        runs: Those with the limit.
    """

    per_token: float
    by_line: int
    runs: list[Run] = field(default_factory=list)

    @property
    def fits(self) -> Run | None:
        """Returns the longest run that fits."""
        return max((run for run in self.runs if not run.error), key=lambda run: run.tokens, default=None)

    @property
    def fails(self) -> Run | None:
        """Returns the shortest run that fails."""
        return min((run for run in self.runs if run.error), key=lambda run: run.tokens, default=None)


def find_longest(
    command: Callable[[int, int], list[str]], mebibytes: int, short: tuple[int, int], most: int | None = None
) -> Longest:
    """Finds the longest sequence that fits, from two short runs and a search near the predicted limit.

    Args:
        command: Returns the command line for a number of tokens and a limit in MiB (0: none). The command prints the
            line ``ready`` when it is set up, then trains one step.
        mebibytes: Limit on the growth of its data after ``ready``.
        short: Lengths of the two runs without a limit.
        most: Longest length to run; None: any.

    Raises:
        SystemExit: A run without a limit fails, or the shortest length does not fit.
    """
    first, second = (_run(command(tokens, 0), tokens) for tokens in short)
    for run in (first, second):
        if run.error:
            sys.exit(f"{' '.join(command(run.tokens, 0))} failed: {run.error}")
    per_token = (second.grown - first.grown) / (second.tokens - first.tokens)
    found = Longest(per_token, int(second.tokens + (mebibytes * 2**20 - second.grown) / per_token))
    tokens = _round(found.by_line * (1 - STEP), most)
    while True:
        run = _run(command(tokens, mebibytes), tokens)
        found.runs.append(run)
        if (found.fits and found.fails) or (not run.error and tokens == most):
            return found
        if run.error and tokens == GRAIN:
            sys.exit(f"not even {tokens} tokens fit: {run.error}")
        if run.error:
            tokens = min(_round(tokens * (1 - 2 * STEP), most), tokens - GRAIN)
        else:
            tokens = max(_round(tokens * (1 + 2 * STEP), most), min(tokens + GRAIN, most or tokens + GRAIN))


def _round(tokens: float, most: int | None) -> int:
    rounded = max(int(tokens) // GRAIN * GRAIN, GRAIN)
    return rounded if most is None else min(rounded, most)


def _run(command: list[str], tokens: int) -> Run:
    """Runs the command and samples the size of its data every millisecond."""
    # With a fixed threshold large tensors have mappings of their own; otherwise gaps in glibc's heap count as used.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    since = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as error,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=error, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        while process.stdout.readline().strip() != "ready" and process.poll() is None:
            pass
        before = most = _data_bytes(process.pid)
        while process.poll() is None:
            most = max(most, _data_bytes(process.pid))
            time.sleep(0.001)
        error.seek(0)
        last = error.read().strip().splitlines()[-1:]
        failed = f"{process.returncode}: {''.join(last)}" if process.returncode else ""
    return Run(tokens, failed, most - before, time.monotonic() - since)


def _data_bytes(process: int) -> int:
    """Returns the bytes that ``RLIMIT_DATA`` limits; 0 once the process has ended."""
    try:
        return status_bytes("VmData", process)
    except (RuntimeError, FileNotFoundError, ProcessLookupError):
        return 0
