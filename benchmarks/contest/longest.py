"""The longest sequence that a training fits with in so much memory, found with few runs.

A run is a process of its own, which trains one step. Two short ones, without a limit, give a line: how much memory
grows by per token. The length where the line meets the limit is then tried, a little below and a little above, with
the limit as ``RLIMIT_DATA``, so that what is reported was seen to fit, and to fail. That the short ones end well says
that a failure with the limit is one of memory; what it said last is kept.
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


@dataclass
class Longest:
    """What was found.

    Attributes:
        tokens: The longest that was seen to fit.
        fails: The shortest that was seen to fail; None: time ended before.
        per_token: Bytes by which memory grows with each token, from short sequences.
        runs: ``(tokens, seconds, what it said last)`` of those with the limit; nothing was said where it fits.
    """

    tokens: int = 0
    fails: int | None = None
    per_token: float = 0.0
    runs: list[tuple[int, float, str]] = field(default_factory=list)


def find_longest(
    command: Callable[[int, int], list[str]], mebibytes: int, short: tuple[int, int], minutes: float
) -> Longest:
    """Searches.

    Args:
        command: Of tokens and MiB (0: no limit), the command that trains one step, and says ``ready`` on a line of its
            own when it is set up.
        mebibytes: By which its data may grow from then on.
        short: Two lengths, the line of which is long enough.
        minutes: After which no further length is tried.
    """
    begun = time.monotonic()
    (low, below), (high, above) = ((tokens, _grown(command(tokens, 0))) for tokens in short)
    found = Longest(per_token=(above - below) / (high - low))
    guess = high + (mebibytes * 2**20 - above) / found.per_token
    tokens = _round(guess * (1 - STEP))
    while True:
        since = time.monotonic()
        said = _ended(command(tokens, mebibytes))
        seconds = time.monotonic() - since
        found.runs.append((tokens, seconds, said))
        if said:
            found.fails = tokens
        else:
            found.tokens = tokens
        longer, shorter = _round(tokens * (1 + 2 * STEP)), _round(tokens * (1 - 2 * STEP))
        is_done = found.tokens and found.fails is not None
        if is_done or time.monotonic() - begun + 1.2 * seconds > 60 * minutes:
            return found
        tokens = shorter if said else longer


def _round(tokens: float) -> int:
    return max(int(tokens) // 64 * 64, 64)


def _environment() -> dict[str, str]:
    # Large tensors in mappings of their own, on both sides: else glibc's heap keeps gaps that count as memory in use.
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}


def _ended(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    return "" if done.returncode == 0 else f"{done.returncode}: {done.stderr.strip().splitlines()[-1:]}"


def _grown(command: list[str]) -> int:
    """By how much the data of a run grows at most, seen from outside every millisecond."""
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, env=_environment()) as run,
    ):
        assert run.stdout is not None
        while run.stdout.readline().strip() != "ready" and run.poll() is None:
            pass
        before = most = _data(run.pid)
        while run.poll() is None:
            most = max(most, _data(run.pid))
            time.sleep(0.001)
        if run.returncode or not before:
            said.seek(0)
            sys.exit(f"{' '.join(command)} ended with {run.returncode}:\n{said.read()[-2000:]}")
    return most - before


def _data(process: int) -> int:
    """What ``RLIMIT_DATA`` limits, in bytes; 0 once the process has ended."""
    try:
        with open(f"/proc/{process}/status") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0
