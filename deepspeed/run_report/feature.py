"""The engine feature for the section ``run_report``: each rank writes a line about each of its steps."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.axes import PIPE
from deepspeed.comm.job.torch_groups import rendezvous_store
from deepspeed.comm.start.batched_store import read_many, those_there
from deepspeed.config.sections.root import Root
from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup, TrackingHooks
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.exit_notes import ExitNotes
from deepspeed.logging import log_dist
from deepspeed.release import VERSION
from deepspeed.run_report.analysis import SlowRank, phase_name, slow_ranks
from deepspeed.run_report.page_times import StandbyWriter, report_at_end, report_of_earlier_start
from deepspeed.run_report.rank_file import RecentSteps, open_folder, rank_path
from deepspeed.run_report.recorder import StepRecorder
from deepspeed.run_report.run_data import PLAN, Line, RankRun, RunData
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime


class RunReportFeature(EngineFeature):
    """A page about the run."""

    title = "run report"
    setting = "run_report"
    only_watches = True

    @override
    def refuse(self, setup: EngineSetup) -> None:
        section = setup.root.run_report
        if section.path is None:
            if section.plan is not None:
                raise DeepSpeedConfigError(
                    f"run_report.plan={section.plan!r}: expected run_report.path beside it, the folder of the page "
                    "that shows the plan, found none; set it, or leave plan out"
                )
            return
        folder = open_folder(Path(section.path), comm.get_rank())
        if comm.get_rank() == 0:
            report_of_earlier_start(folder)
        if section.plan is not None and comm.get_rank() == 0:
            try:
                shutil.copyfile(section.plan, folder / PLAN)
            except OSError as error:
                raise DeepSpeedConfigError(
                    f"run_report.plan={section.plan!r}: expected the file of ds_plan --json, found: {error.strerror}. "
                    "Make it with ds_plan, or leave the key out"
                ) from error

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks | None:
        section, rank, world_size = setup.root.run_report, comm.get_rank(), comm.get_world_size()
        if section.path is None:
            store = rendezvous_store()
            if not section.stragglers or world_size == 1 or store is None:
                return None
            posts = StepBoard(store, rank, world_size, _facts(setup, runtime))
            return TrackingHooks(StepRecorder(posts.steps, rank, {}, after_step=posts.after_step))
        folder = Path(section.path)
        # If rank 0 is killed, the launcher of this package writes the page, or else the standby.
        notes, standby = ExitNotes.here(), None
        if rank == 0 and notes.has_launcher:
            notes.run_report_missing(folder)
        elif rank == 0:
            standby = StandbyWriter(folder)
        on_close = partial(report_at_end, folder, rank, standby=standby)
        watch = StragglerWatch(RankFileReader(folder).read, world_size) if rank == 0 and world_size > 1 else None
        after_step = None if watch is None else watch.after_step
        return TrackingHooks(
            StepRecorder(folder, rank, _facts(setup, runtime), on_close=on_close, after_step=after_step)
        )


FEATURE = RunReportFeature()


def _facts(setup: EngineSetup, runtime: ZeroRuntime) -> dict[str, Any]:
    mesh, rank = setup.ranks.mesh, comm.get_rank()
    given, defaults = settings_of(setup.root)
    return {
        "world_size": comm.get_world_size(),
        "axes": mesh.sizes,
        "stage": mesh.coordinate(rank).get(PIPE, 0),
        "host": platform.node(),
        "pid": os.getpid(),
        "device": get_accelerator().device_name(setup.device.index),
        "parameters": sum(bucket.used_numel for bucket in runtime.layout.buckets),
        "versions": {
            "deepspeed": VERSION,
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "system": platform.platform(),
        },
        "config": given,
        "defaults": defaults if rank == 0 else {},
    }


_SECRETS = ("api_key",)


def settings_of(root: Root) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the keys that differ from their defaults, and the others, by dotted path."""
    given = _flat(root.model_dump(mode="json", exclude_defaults=True))
    given.update({path: "(not shown)" for path in given if path.rpartition(".")[2] in _SECRETS})
    everything = _flat(root.model_dump(mode="json"))
    return given, {path: value for path, value in everything.items() if path not in given}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(_flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


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
    """Logs a line on rank 0 when a rank stays slow, once per period in which it is.

    A look compares at most 32 ranks, spread over the job; the next look takes others.

    Args:
        read: Returns the latest steps of a rank; None where they are not known.
        world_size: Ranks of the job.
        seconds: The clock.
    """

    def __init__(
        self,
        read: Callable[[int], RankRun | None],
        world_size: int,
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._read = read
        self._world_size = world_size
        self._seconds = seconds
        self._next = seconds() + _PAUSE
        self._named: set[int] = set()
        self._looks = 0

    def after_step(self, recorder: StepRecorder, step: int) -> None:
        """Compares the ranks if it is time to: logs those that have become slow, and writes them as events.

        Args:
            recorder: The recorder of rank 0.
            step: The latest one.
        """
        started = self._seconds()
        if started < self._next:
            return
        recorder.flush()
        parts = -(-self._world_size // _AT_ONCE)
        ranks = range(self._looks % parts, self._world_size, parts)
        self._looks += 1
        slow = self._slow(ranks)
        lasting = {s.rank for s in slow}
        worst: dict[int, SlowRank] = {}
        for found in sorted(slow, key=lambda s: s.share):
            if found.factor >= STAYS_SLOW and found.share >= MATTERS and found.rank not in self._named:
                worst[found.rank] = found
        for found in worst.values():
            name = phase_name(found.phase)
            where = f"{name} (data, the program's own code)" if found.phase == "outside" else f"in {name}"
            log_dist(
                f"straggler: rank {found.rank} ({found.host}) takes {found.factor:.2f} times as long as the median of "
                f"the other ranks {where}, over the last {WINDOW} steps: {found.share:.0%} of a step"
            )
            recorder.event(
                "straggler", step=step, slow_rank=found.rank, phase=found.phase, factor=round(found.factor, 2)
            )
        self._named = (self._named - (set(ranks) - lasting)) | set(worst)
        now = self._seconds()
        self._next = now + max(_PAUSE, (now - started) / _COST)

    def _slow(self, ranks: Iterable[int]) -> list[SlowRank]:
        runs = {rank: run for rank in ranks if (run := self._read(rank)) is not None}
        common = set.intersection(*(set(run.steps) for run in runs.values())) if len(runs) > 1 else set()
        window = sorted(common)[-WINDOW:]
        return slow_ranks(RunData(runs), window) if len(window) == WINDOW else []


class RankFileReader:
    """Reads the latest steps of ranks from their files, as far as this machine sees them.

    Args:
        folder: The folder of the run, on this machine or shared by all.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._facts: dict[int, Line] = {}

    def read(self, rank: int) -> RankRun | None:
        """Returns the last steps of a rank; None without a file, as where each machine has its own folder."""
        try:
            with rank_path(self._folder, rank).open("rb") as file:
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


class StepBoard:
    """Posts the latest steps of this rank at the rendezvous store every 20 steps; rank 0 compares them a step later.

    Where ranks wait for each other in every step, all have posted by then. No rank waits for a post.

    Args:
        store: A torch ``Store`` that all ranks share.
        rank: The rank of this process.
        world_size: Ranks of the job.
        facts: Facts of this rank, see :class:`~deepspeed.run_report.run_data.RankRun`.
        seconds: The clock of the watch.

    Attributes:
        steps: Lines of the steps that are posted.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        facts: Mapping[str, Any],
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps = RecentSteps(WINDOW)
        self._store, self._rank = store, rank
        self._facts = {name: facts[name] for name in ("host", "stage")}
        self._number = store.add(f"{_POSTS}/engines/{rank}", 1)  # of this engine; the same on all ranks
        self._watch = StragglerWatch(self._read, world_size, seconds) if rank == 0 else None
        self._posted: int | None = None  # the last step of the latest post

    def after_step(self, recorder: StepRecorder, step: int) -> None:
        """Posts, or compares, if it is time to.

        Args:
            recorder: The recorder of this rank.
            step: The latest one.
        """
        # The store ends with the rank that holds it, and a rank that ends normally may be the last one.
        with contextlib.suppress(RuntimeError):
            if step % WINDOW == 0 and self.steps.lines:
                self._posted = self.steps.lines[-1]["step"]
                kept = [{name: line[name] for name in _POSTED} for line in self.steps.lines]
                self._store.set(self._key(self._rank), json.dumps({"facts": self._facts, "lines": kept}))
                self._store.check([self._key(self._rank)])  # set does not wait for the store, its next reply does
            elif step % WINDOW == 1 and self._watch is not None and self._posted is not None:
                self._watch.after_step(recorder, step)

    def _key(self, rank: int) -> str:
        return f"{_POSTS}/{self._number}/{rank}"

    def _read(self, rank: int) -> RankRun | None:
        """Returns the steps that a rank has posted; None if they are not those of the latest post of this rank."""
        keys = those_there(self._store, [self._key(rank)])
        if not keys:
            return None
        post = json.loads(read_many(self._store, keys)[0])
        run = RankRun(rank, facts=post["facts"])
        for line in post["lines"]:
            run.take(line)
        return run if self._posted in run.steps else None


_POSTS = "deepspeed/stragglers"
_POSTED = ("kind", "step", "seconds", "phases", "waits")
