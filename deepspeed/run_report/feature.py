"""The engine feature of the section ``run_report``: each rank writes a line about each of its steps."""

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
from typing import Any, BinaryIO

import torch
from typing_extensions import override

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.axes import PIPE
from deepspeed.comm.base.batched_store import read_many, those_there
from deepspeed.comm.base.torch_groups import rendezvous_store
from deepspeed.config.sections.monitor import RunReport, hide_secrets
from deepspeed.config.sections.root import Root
from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup, TrackingHooks
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.exit_notes import ExitNotes
from deepspeed.logging import log_dist
from deepspeed.release import VERSION
from deepspeed.run_report.analysis import SlowRank, phase_name, slow_ranks
from deepspeed.run_report.page_times import StandbyWriter, report_at_end, report_of_earlier_start
from deepspeed.run_report.rank_file import RecentSteps, open_folder, rank_path
from deepspeed.run_report.recorder import StepRecorder
from deepspeed.run_report.run_data import PLAN, Line, RankRun, RunData, read_plan
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime


class RunReportFeature(EngineFeature):
    """Records the steps of each rank for the page about the run, and watches for slow ranks."""

    title = "run report"
    setting = "run_report"
    only_watches = True

    @override
    def refuse(self, setup: EngineSetup) -> None:
        section = setup.root.run_report
        if section.path is None:
            if section.plan is not None:
                raise DeepSpeedConfigError(
                    f"run_report.plan={section.plan!r}: expected run_report.path too, the folder of the page that "
                    "shows the plan, found none; set it, or leave plan out"
                )
        else:
            _prepare_folder(section)

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks | None:
        section, rank, world_size = setup.root.run_report, comm.get_rank(), comm.get_world_size()
        if section.path is None:
            store = rendezvous_store()
            if not section.stragglers or world_size == 1 or store is None:
                return None
            board = StepBoard(store, rank, world_size, _facts(setup, runtime))
            return TrackingHooks(StepRecorder(board.steps, rank, {}, after_step=board.after_step))
        folder = Path(section.path)
        # If rank 0 is killed, the launcher of this package writes the page; without it, the standby process does.
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


def _prepare_folder(section: RunReport) -> None:
    """Creates the folder, on rank 0 with the plan; raises DeepSpeedConfigError where a file is not usable."""
    folder = open_folder(Path(section.path or ""), comm.get_rank())
    if comm.get_rank() == 0:
        report_of_earlier_start(folder)
    if section.plan is not None and comm.get_rank() == 0:
        try:
            read_plan(Path(section.plan))
            with contextlib.suppress(shutil.SameFileError):
                shutil.copyfile(section.plan, folder / PLAN)
        except DeepSpeedError as error:
            raise DeepSpeedConfigError(f"run_report.plan={section.plan!r}: {error}") from error
        except OSError as error:
            raise DeepSpeedConfigError(
                f"run_report.plan={section.plan!r}: expected the file of ds_plan --json, found: {error.strerror}. "
                "Write it with ds_plan, or leave the key out"
            ) from error


def _facts(setup: EngineSetup, runtime: ZeroRuntime) -> dict[str, Any]:
    mesh, rank = setup.ranks.mesh, comm.get_rank()
    changed, defaults = settings_of(setup.root)
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
        "config": changed,
        "defaults": defaults if rank == 0 else {},
    }


def settings_of(root: Root) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns two dicts of values by dotted key: those that differ from their defaults, and the others."""
    changed = _flat(hide_secrets(root.model_dump(exclude_defaults=True)))
    settings = _flat(root.model_dump())
    return changed, {path: value for path, value in settings.items() if path not in changed}


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found.update(_flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """Returns a value of JSON; for objects that only a program can set, such as functions, their text."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return str(value)
    return value


WINDOW = 20
"""Number of latest steps over which ranks are compared."""

MIN_FACTOR = 1.3
"""Least relative score of a rank that is reported."""

MIN_SHARE = 0.05
"""Least additional time of a rank that is reported, as a share of the step."""

_MAX_COMPARED = 32  # ranks per comparison, which rank 0 waits for
_TAIL_BYTES = 32 << 10  # read at the end of a file
_MIN_PAUSE = 10.0  # seconds between two comparisons
_MAX_TIME_SHARE = 0.002  # of comparisons; the pause grows with their duration


class StragglerWatch:
    """Logs a line on rank 0 when a rank becomes slow, once until it is no longer slow.

    A comparison takes at most 32 ranks, spread over the job; the next one takes others.

    ``read`` returns the latest steps of a rank, or None if they are not known.
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
        self._next = seconds() + _MIN_PAUSE
        self._named: set[int] = set()
        self._comparisons = 0

    def after_step(self, recorder: StepRecorder, step: int) -> None:
        """Compares ranks if the pause is over; logs those that have become slow, and records them on rank 0."""
        started = self._seconds()
        if started < self._next:
            return
        recorder.flush()
        parts = -(-self._world_size // _MAX_COMPARED)
        ranks = range(self._comparisons % parts, self._world_size, parts)
        self._comparisons += 1
        slow = self._slow(ranks)
        lasting = {s.rank for s in slow}
        worst: dict[int, SlowRank] = {}
        for found in sorted(slow, key=lambda s: s.share):
            if found.factor >= MIN_FACTOR and found.share >= MIN_SHARE and found.rank not in self._named:
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
        self._next = now + max(_MIN_PAUSE, (now - started) / _MAX_TIME_SHARE)

    def _slow(self, ranks: Iterable[int]) -> list[SlowRank]:
        runs = {rank: run for rank in ranks if (run := self._read(rank)) is not None}
        common = set.intersection(*(set(run.steps) for run in runs.values())) if len(runs) > 1 else set()
        window = sorted(common)[-WINDOW:]
        return slow_ranks(RunData(runs), window) if len(window) == WINDOW else []


class RankFileReader:
    """Reads the latest steps of ranks from their files, if this machine has them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._facts: dict[int, Line] = {}

    def read(self, rank: int) -> RankRun | None:
        """Returns the last steps of a rank; None if its file is missing, as the folder may be of this machine only."""
        try:
            with rank_path(self._folder, rank).open("rb") as file:
                size = file.seek(0, 2)
                if rank not in self._facts:
                    self._facts[rank] = _last_start(file, size)
                file.seek(max(size - _TAIL_BYTES, 0))
                texts = file.read().splitlines()
        except (OSError, LookupError):  # missing yet, or without its first line; or the file system fails
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
        self._facts[rank] = run.facts
        return run


def _last_start(file: BinaryIO, size: int) -> Line:
    """Returns the line of the latest start, reading backwards from ``size`` bytes; LookupError where there is none."""
    rest, end = b"", size
    while end > 0:
        begin = max(end - _TAIL_BYTES, 0)
        file.seek(begin)
        first, *lines = (file.read(end - begin) + rest).split(b"\n")
        for text in reversed(lines if begin else [first, *lines]):
            if text.startswith(b'{"kind": "start"'):
                with contextlib.suppress(ValueError):  # of a rank that was killed while it wrote
                    return json.loads(text)
        rest, end = first, begin
    raise LookupError("the file has no line of a start")


class StepBoard:
    """Writes the latest steps of this rank to the rendezvous store every 20 steps; rank 0 compares them a step later.

    If ranks wait for each other in every step, all have written by then. No rank waits for another one here.

    Args:
        store: A torch ``Store`` that all ranks share.
        seconds: Returns the current time in seconds, for the watch of rank 0.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        facts: Mapping[str, Any],
        seconds: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps = RecentSteps(WINDOW)  # lines of the latest steps
        self._store, self._rank = store, rank
        self._facts = {name: facts[name] for name in ("host", "stage")}
        self._number = store.add(f"{_POSTS}/engines/{rank}", 1)  # of this engine; the same on all ranks
        self._watch = StragglerWatch(self._read, world_size, seconds) if rank == 0 else None
        self._posted: int | None = None  # the last step that was written

    def after_step(self, recorder: StepRecorder, step: int) -> None:
        """Writes every 20 steps; one step later rank 0 compares."""
        # The store ends with the process that serves it, which may end before this one.
        with contextlib.suppress(RuntimeError):
            if step % WINDOW == 0 and self.steps.lines:
                self._posted = self.steps.lines[-1]["step"]
                lines = [{name: line[name] for name in _POSTED} for line in self.steps.lines]
                self._store.set(self._key(self._rank), json.dumps({"facts": self._facts, "lines": lines}))
                self._store.check([self._key(self._rank)])  # set() does not wait for the store, check() does
            elif step % WINDOW == 1 and self._watch is not None and self._posted is not None:
                self._watch.after_step(recorder, step)

    def _key(self, rank: int) -> str:
        return f"{_POSTS}/{self._number}/{rank}"

    def _read(self, rank: int) -> RankRun | None:
        """Returns the steps that a rank has written; None unless the last written step of this rank is among them."""
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
