"""Writes the file of one rank: a JSON object per line, readable while it is written and after a crash.

The kinds of lines are ``start`` (once per start of the program), ``step``, ``event`` and ``end``.
"""

from __future__ import annotations

import json
import time
from collections import deque
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError

PATTERN = "rank-*.jsonl"

OUTSIDE = "outside"
"""The phase between calls of the engine: data, evaluation, and the program's own code."""

_FLUSH_SECONDS = 1.0  # the longest time that lines stay in memory, if more lines follow


class RankFile:
    """Appends lines to a rank's file in ``folder``; raises DeepSpeedConfigError where it cannot be written."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = rank_path(open_folder(folder, rank), rank)
        if self.path.exists() and self.path.stat().st_size:  # a killed rank may have left an incomplete line
            with self.path.open("rb+") as file:
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
        self._file = self.path.open("a", encoding="utf-8")
        self._flushed = time.monotonic()

    def write(self, kind: str, **values: Any) -> None:
        """Appends a line with ``values``; flushes the file if that was not done for a second."""
        self._file.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **values}) + "\n")
        now = time.monotonic()
        if now - self._flushed > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = now

    def flush(self) -> None:
        """Flushes all lines to the file, where readers see them."""
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file. May be called twice."""
        self._file.close()


class RecentSteps:
    """Keeps the lines of the latest ``count`` steps in memory instead of a file."""

    def __init__(self, count: int) -> None:
        self.lines: deque[dict[str, Any]] = deque(maxlen=count)  # the lines, the latest last

    def write(self, kind: str, **values: Any) -> None:
        """Keeps the line of a step, without its time; ignores other kinds of lines."""
        if kind == "step":
            self.lines.append({"kind": kind, **values})

    def flush(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


def open_folder(folder: Path, rank: int) -> Path:
    """Creates the folder of a run if missing, and returns it; raises DeepSpeedConfigError where it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise DeepSpeedConfigError(
            f"run_report.path={str(folder)!r}: expected a folder that rank {rank} can write to, found: "
            f"{error.strerror}. Change the path or its permissions"
        ) from error


def rank_path(folder: Path, rank: int) -> Path:
    """Returns the path of the file of a rank."""
    return folder / f"rank-{rank:05d}.jsonl"


def rank_of(path: Path) -> int:
    """Returns the rank whose file ``path`` is; raises DeepSpeedError where the name has no number."""
    number = path.stem.removeprefix("rank-")
    if not number.isdecimal():
        raise DeepSpeedError(
            f"{path}: expected a name such as rank-00000.jsonl, found another; move the file to another folder, or "
            "name it after its rank"
        )
    return int(number)


def has_end(path: Path) -> bool:
    """Returns whether the last line of the file is its end."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 200, 0))
        return any(b'"kind": "end"' in line for line in file.read().splitlines()[-1:])
