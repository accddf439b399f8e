"""Names ranks that stay slow while the run goes on, from the files that all ranks write: without a collective."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from deepspeed.logging import log_dist
from deepspeed.run_report.analysis import SlowRank, slow_ranks
from deepspeed.run_report.rank_file import rank_path
from deepspeed.run_report.recorder import StepRecorder
from deepspeed.run_report.run_data import Line, RankRun, RunData

WINDOW = 20
"""Steps over which a rank is compared."""

STAYS_SLOW = 1.3
"""Relative score from which a rank is named, if it takes :data:`MATTERS` of the step longer too."""

MATTERS = 0.05

_AT_ONCE = 32  # ranks that one look compares at most, since rank 0 stands still for it
_TAIL = 32 << 10  # bytes at the end of a file that are read
_PAUSE = 10.0  # seconds between two looks, at least
_COST = 0.002  # of the time, at most, so that the pause grows with the number of ranks


class StragglerWatch:
    """Logs a line on rank 0 when a rank stays slow, once per stretch of time in which it is.

    A look compares at most 32 ranks, spread over the job; the next look takes others.

    Only files that this machine sees are compared: one machine's, or all in a shared folder.

    Args:
        folder: Of the run.
        world_size: Ranks of the job; files of further ranks are left from an earlier run.
        seconds: The clock.
    """

    def __init__(self, folder: Path, world_size: int, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._paths = [rank_path(folder, rank) for rank in range(world_size)]
        self._facts: dict[int, Line] = {}
        self._seconds = seconds
        self._next = seconds() + _PAUSE
        self._named: set[int] = set()
        self._looks = 0

    def after_step(self, recorder: StepRecorder, step: int) -> None:
        """Compares the ranks if it is time to: logs those that have become slow, and writes them as events.

        Args:
            recorder: Of rank 0.
            step: The latest one.
        """
        started = self._seconds()
        if started < self._next:
            return
        recorder.flush()
        parts = -(-len(self._paths) // _AT_ONCE)
        ranks = range(self._looks % parts, len(self._paths), parts)
        self._looks += 1
        slow = self._slow(ranks)
        lasting = {s.rank for s in slow}
        worst: dict[int, SlowRank] = {}
        for found in sorted(slow, key=lambda s: s.share):
            if found.factor >= STAYS_SLOW and found.share >= MATTERS and found.rank not in self._named:
                worst[found.rank] = found
        for found in worst.values():
            where = "outside the engine (data, the program's own code)" if found.phase == "outside" else found.phase
            log_dist(
                f"straggler: rank {found.rank} ({found.host}) takes {found.factor:.2f} times as long as the median of "
                f"the other ranks in {where}, over the last {WINDOW} steps: {found.share:.0%} of a step"
            )
            recorder.event(
                "straggler", step=step, slow_rank=found.rank, phase=found.phase, factor=round(found.factor, 2)
            )
        self._named = (self._named - (set(ranks) - lasting)) | set(worst)
        now = self._seconds()
        self._next = now + max(_PAUSE, (now - started) / _COST)

    def _slow(self, ranks: Iterable[int]) -> list[SlowRank]:
        runs = {rank: run for rank in ranks if (run := self._read(rank, self._paths[rank])) is not None}
        common = set.intersection(*(set(run.steps) for run in runs.values())) if len(runs) > 1 else set()
        window = sorted(common)[-WINDOW:]
        return slow_ranks(RunData(runs), window) if len(window) == WINDOW else []

    def _read(self, rank: int, path: Path) -> RankRun | None:
        """Returns the last steps of a rank; None without a file, as where each machine has its own folder."""
        try:
            with path.open("rb") as file:
                if rank not in self._facts:
                    self._facts[rank] = json.loads(file.readline())
                size = file.seek(0, 2)
                file.seek(max(size - _TAIL, 0))
                texts = file.read().splitlines()
        except (FileNotFoundError, ValueError):  # not there yet, or its first line is being written
            return None
        run = RankRun(rank, facts=self._facts[rank])
        for text in texts:
            try:
                line = json.loads(text)
            except ValueError:  # cut at either end
                continue
            if line.get("kind") == "start":  # the steps before are those of an earlier start
                run.steps.clear()
            run.take(line)
        return run
