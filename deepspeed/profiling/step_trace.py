"""Traces a few steps of one rank with torch's profiler.

The profiler records every operation, on the CPU and on each stream of a device. This module adds ranges for the phases
of a step, for micro-batches of a pipeline's stages, and for waits for other ranks.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from deepspeed.at_exit import ExitAction
from deepspeed.comm.base.counters import waiting
from deepspeed.engine_feature import StepInfo, StepTracker
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist

PATTERN = "rank-*.trace.json"
_NO_LOG_LINES = "6"  # above every level of kineto, the library below torch's profiler


class TraceRecorder(StepTracker):
    """Traces ``steps`` steps of this rank from ``first_step`` (from 1) on and writes ``rank-<N>.trace.json``.

    Raises:
        DeepSpeedConfigError: The folder cannot be created.
    """

    def __init__(self, folder: Path, rank: int, first_step: int, steps: int) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DeepSpeedConfigError(
                f"trace.path={str(folder)!r}: expected a folder that rank {rank} can create, found: {error.strerror}. "
                "Change the path or its permissions"
            ) from error
        if rank > 0:  # torch's profiler logs every start and stop to stderr: once per job is enough
            os.environ.setdefault("KINETO_LOG_LEVEL", _NO_LOG_LINES)
        self._path = folder / f"rank-{rank:05d}.trace.json"
        self._first, self._last = first_step, first_step + steps - 1
        self._profile: Any = None
        self._open: list[tuple[str, Any]] = []  # ranges, outermost first
        if first_step > 1:
            with (
                self._profiler()
            ):  # the first profiler of a process imports for seconds, which would make a step seem slow
                pass
        self._begin_step(1)

    @override
    def begin(self, phase: str) -> None:
        if self._profile is not None:
            self._open.append((phase, _enter(phase)))

    @override
    def end(self, phase: str) -> None:
        if phase in [open_name for open_name, _ in self._open]:
            ended = None
            while ended != phase:  # an exception may have left ranges inside it open
                ended, entered = self._open.pop()
                entered.__exit__(None, None, None)

    @override
    def named(self, name: str) -> AbstractContextManager[None]:
        return self.during(name)

    def wait_begins(self, axis: str, label: str) -> Any:
        """Opens a range for a wait for the ranks along ``axis`` and returns it."""
        return _enter(f"wait {axis}: {label}")

    def wait_ends(self, axis: str, mark: Any) -> None:
        """Closes the range that :meth:`wait_begins` returned."""
        mark.__exit__(None, None, None)

    @override
    def end_step(self, info: StepInfo, loss: torch.Tensor | None) -> None:
        self._end_range_of_step()
        if info.step == self._last:
            self.close()
        self._begin_step(info.step + 1)

    def _begin_step(self, step: int) -> None:
        if step == self._first:
            self._start()
        self.begin(f"step {step}")

    @override
    def close(self) -> None:
        if self._profile is None:
            return
        self._end_range_of_step()
        profile, self._profile = self._profile, None
        self._at_exit.cancel()
        waiting.stop(self)
        profile.__exit__(None, None, None)
        profile.export_chrome_trace(str(self._path))
        log_dist(f"trace: {self._path}; ds_trace {self._path.parent} merges the files of all ranks")

    def _start(self) -> None:
        self._profile = self._profiler().__enter__()
        # Torch's profiler crashes the process (SIGSEGV) if it still records when the interpreter has ended.
        self._at_exit = ExitAction(self.close, on_signals=True)
        waiting.start(self)

    def _profiler(self) -> Any:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        return torch.profiler.profile(activities=activities)

    def _end_range_of_step(self) -> None:
        if self._open:
            self.end(self._open[0][0])


def _enter(name: str) -> Any:
    return torch.profiler.record_function(name).__enter__()
