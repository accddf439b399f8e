"""Reads the files of a run's ranks, even if the run continues or has crashed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.errors import DeepSpeedError
from deepspeed.run_report.rank_file import PATTERN, rank_of

Line = dict[str, Any]

PLAN = "plan.json"
"""Name of the plan in the folder of a run."""


@dataclass
class RankRun:
    """Holds what one rank has written for the report."""

    rank: int  # its number
    facts: Line = field(default_factory=dict)  # the facts of the latest start
    starts: list[float] = field(default_factory=list)  # times of all starts, in seconds since the epoch
    # lines of steps by number; the latest line of a step that ran again after a restart
    steps: dict[int, Line] = field(default_factory=dict)
    events: list[Line] = field(default_factory=list)  # lines of events in order of time
    has_ended: bool = False  # whether the program closed the file after the latest start
    # ``time`` and, if known, ``step`` of the last line after the latest start
    last_line: Line = field(default_factory=dict)
    # the ``last_line`` of each earlier start whose program did not close the file
    breaks: list[Line] = field(default_factory=list)

    def take(self, line: Line) -> None:
        """Adds one line of the file; ignores lines of unknown kinds."""
        kind = line.get("kind")
        if kind == "start":
            # Another engine of the same process is not a restart.
            if self.starts and not self.has_ended and line.get("pid") != self.facts.get("pid"):
                self.breaks.append(self.last_line)
            self.last_line = {}
            self.facts, self.has_ended = line, False
            self.starts.append(line["time"])
        elif kind == "step":
            self.steps[line["step"]] = line
        elif kind == "event":
            self.events.append(line)
        elif kind == "end":
            self.has_ended = True
        if "time" in line:
            self.last_line = {**self.last_line, "time": line["time"]}
            if "step" in line:
                self.last_line["step"] = line["step"]


@dataclass
class RunData:
    """The lines of all ranks of a run."""

    ranks: dict[int, RankRun]  # the files of ranks by rank number
    # number of lines that are ignored: incomplete, as a killed rank leaves one, or of another program
    torn_lines: int = 0
    plan: Line | None = None  # result of ``ds_plan --json`` for the run, if there is one

    @property
    def first(self) -> RankRun:
        """The file of the lowest rank, the one that records the loss."""
        return self.ranks[min(self.ranks)]

    @property
    def began(self) -> float:
        """Time of the first line of the lowest rank, in seconds since the epoch."""
        lines = [*self.first.steps.values(), *self.first.events]
        return min([*self.first.starts, *(line["time"] for line in lines)], default=0.0)

    @property
    def step_numbers(self) -> list[int]:
        """Numbers of the steps that any rank has written, in order."""
        return sorted({number for run in self.ranks.values() for number in run.steps})


def read_run(folder: Path) -> RunData:
    """Reads the run in ``folder``, of one or more nodes; raises DeepSpeedError where files are missing or damaged."""
    ranks: dict[int, RankRun] = {}
    torn = 0
    for path in sorted(folder.glob(PATTERN)):
        rank = rank_of(path)
        ranks[rank] = RankRun(rank)
        try:
            content = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise DeepSpeedError(f"{path}: cannot be read ({error.strerror}); correct its permissions") from error
        for text in content.splitlines():
            line = _parsed(text)
            if line is None:
                torn += 1
            else:
                ranks[rank].take(line)
    if not ranks:
        raise DeepSpeedError(
            f"{folder}: expected files {PATTERN}, which a run with run_report.path writes; found none. Give the folder "
            "in run_report.path"
        )
    return RunData(ranks, torn, read_plan(folder / PLAN))


_KEYS = {
    "start": {"time"},
    "step": {"time", "step", "seconds", "phases", "waits", "tokens", "memory", "bytes"},
    "event": {"time", "name"},
}
"""Keys that lines of each kind have."""


def _parsed(text: str) -> Line | None:
    """Returns a line of a rank's file; None for an incomplete one, or one of another program."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and _KEYS.get(str(line.get("kind")), set()) <= line.keys() else None


def read_plan(path: Path) -> Line | None:
    """Returns the plan in a file, None without a file; raises DeepSpeedError where it is no plan of one job."""
    if not path.exists():
        return None
    try:
        plan: Line = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DeepSpeedError(
            f"{path}: expected the output of ds_plan --json, found: {error}. Copy the file again, or remove it"
        ) from error
    if not isinstance(plan, dict):
        raise DeepSpeedError(
            f"{path}: expected the output of ds_plan --json for one job, found {type(plan).__name__}, as --sweep "
            "prints. Write the plan without --sweep, or remove the file"
        )
    return plan
