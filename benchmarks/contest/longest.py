"""The longest sequence that a training fits with in so much memory, found with few runs.

A run is a process of its own, which trains one step. Two short ones, without a limit, give a line: how much memory
grows by per token. The length where the line meets the limit is then tried, a little below and a little above, with
the limit as ``RLIMIT_DATA``, so that what is reported was seen to fit, and to fail. That the short ones end well shows
that a failure with the limit is one of memory; the last lines of its output are kept. Attention's time grows with the
square of the length: beyond a given length nothing is tried, and the line alone shows how far memory would reach.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

STEP = 1 / 24
GRAIN = 64  # tokens


@dataclass
class Run:
    """One run with the limit.

    Attributes:
        tokens: Of its sequence.
        error: The last lines of its output where it failed; nothing where it fits.
        grown: Bytes by which its data grew at most.
        seconds: How long it took, imports included.
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
        command: Of tokens and MiB (0: no limit), the command that trains one step, and prints ``ready`` on a line of
            its own when it is set up.
        mebibytes: By which its data may grow from then on.
        short: Two lengths, the line of which is long enough.
        most: Tokens that are tried at most; None: any number.
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
    """Runs it, and looks from outside every millisecond at its data."""
    # Large tensors in mappings of their own, on both sides: else glibc's heap keeps gaps that count as memory in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    since = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as error,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=error, text=True, env=environment) as process,
    ):
        assert process.stdout is not None
        while process.stdout.readline().strip() != "ready" and process.poll() is None:
            pass
        before = most = _data(process.pid)
        while process.poll() is None:
            most = max(most, _data(process.pid))
            time.sleep(0.001)
        error.seek(0)
        last = error.read().strip().splitlines()[-1:]
        failed = f"{process.returncode}: {''.join(last)}" if process.returncode else ""
    return Run(tokens, failed, most - before, time.monotonic() - since)


def _data(process: int) -> int:
    """What ``RLIMIT_DATA`` limits, in bytes; 0 once the process has ended."""
    try:
        with open(f"/proc/{process}/status") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0
