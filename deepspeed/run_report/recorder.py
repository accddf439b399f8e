"""Records where the time of a rank's steps goes, without collectives and without waiting for the device.

Therefore the times of a step are read one step later. On a device that runs behind its host (CUDA), times are those
between events on its compute stream.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.base.counters import traffic, waiting
from deepspeed.engine_feature import SCHEDULE, StepInfo, StepTracker
from deepspeed.run_report.clock import PhaseClock, phase_clock
from deepspeed.run_report.failures import FAILURE, describe_exception, uncaught_exception
from deepspeed.run_report.rank_file import OUTSIDE, RankFile, RecentSteps

_INSIDE_SCHEDULE = ("forward", "backward", "step")
_MAX_INTERVALS = 4096
"""Number of marks of a step after which they are read at once: an evaluation may run any number of forwards."""


@dataclass
class _OpenStep:
    """Marks of a step whose times have not been read yet."""

    started: Any  # mark at its beginning
    ended: Any = None  # mark at its end
    # ``(phase, begin, end)`` of marks that are not yet counted in :attr:`phases`
    intervals: list[tuple[str, Any, Any]] = field(default_factory=list)
    # ``(phase, axis, begin, end)`` of marks that are not yet counted in :attr:`waited`
    waits: list[tuple[str, str, Any, Any]] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds by phase
    # seconds by phase and axis
    waited: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    # other values of its line; the loss may be a tensor (0-dim) on the device
    values: dict[str, Any] = field(default_factory=dict)

    def read_marks(self, clock: PhaseClock) -> None:
        """Reads the marks and releases them."""
        for phase, begin, end in self.intervals:
            self.phases[phase] += clock.seconds(begin, end)
        for phase, axis, begin, end in self.waits:
            self.waited[phase][axis] += clock.seconds(begin, end)
        self.intervals.clear()
        self.waits.clear()


class _StepWriter:
    """Writes one line per step to a rank's file, one step late, so that no step waits for the device."""

    def __init__(self, file: RankFile | RecentSteps, clock: PhaseClock, on_close: Callable[[bool], Any] | None) -> None:
        self.file = file
        self._clock = clock
        self._on_close = on_close
        self._unread: _OpenStep | None = None
        self._earlier_exception = uncaught_exception()

    def take(self, step: _OpenStep | None) -> None:
        before, self._unread = self._unread, step
        if before is not None:
            self._write(before)

    def close(self) -> None:
        """Writes the last step and the exception that ends the program, if any, and closes the file."""
        failure = describe_exception(self._earlier_exception)
        if failure:
            # Before the step, as marks cannot be read after some failures of the device.
            step = {} if self._unread is None else {"step": self._unread.values["step"]}
            self.file.write("event", name=FAILURE, **step, **failure)
            self.file.flush()
        try:
            self.take(None)
        finally:
            self.file.write("end")
            self.file.close()
            if self._on_close is not None:
                self._on_close(bool(failure))

    def _write(self, step: _OpenStep) -> None:
        step.read_marks(self._clock)
        phases, waits, total = step.phases, step.waited, self._clock.seconds(step.started, step.ended)
        if SCHEDULE in phases:
            phases[SCHEDULE] = max(phases[SCHEDULE] - sum(phases.get(name, 0.0) for name in _INSIDE_SCHEDULE), 0.0)
        phases[OUTSIDE] = max(total - sum(phases.values()), 0.0)
        loss = step.values.pop("loss")
        if loss is not None and math.isfinite(value := float(loss)):
            step.values["loss"] = value
        self.file.write("step", seconds=_rounded(total), phases=_rounded(phases), waits=_rounded(waits), **step.values)


class StepRecorder(StepTracker):
    """Writes a line about each step of this rank, until it is closed or the program ends.

    Args:
        target: Folder of the run, or a buffer of the latest steps, which get neither losses nor events.
        on_close: Called after the last line, with whether an exception ends the program.
        after_step: Called after each step with this recorder and the step's number.
    """

    def __init__(
        self,
        target: Path | RecentSteps,
        rank: int,
        facts: Mapping[str, Any],
        clock: PhaseClock | None = None,
        on_close: Callable[[bool], Any] | None = None,
        after_step: Callable[[StepRecorder, int], Any] | None = None,
    ) -> None:
        self._after_step = after_step
        self._clock = clock if clock is not None else phase_clock()
        has_file = isinstance(target, Path)
        self.uses_loss = self.uses_events = has_file
        file = RankFile(target, rank) if isinstance(target, Path) else target
        file.write("start", rank=rank, **facts)
        file.flush()
        self._phases: list[tuple[str, Any]] = []  # open phases with their marks, outermost first
        self._tokens = 0
        self._records_memory = has_file and rank == 0  # set to False by the first rows
        self._sent = _bytes_by_axis()
        self._step = _OpenStep(self._clock.mark())
        self._writer = _StepWriter(file, self._clock, on_close)
        waiting.start(self)
        self._finish = weakref.finalize(self, self._writer.close)

    # -- phases ------------------------------------------------------------------------------------------------------

    @override
    def begin(self, phase: str) -> None:
        self._phases = [
            open_phase for open_phase in self._phases if open_phase[0] != phase
        ]  # an exception left it open
        self._phases.append((phase, self._clock.mark()))

    @override
    def end(self, phase: str) -> None:
        if not self._phases or self._phases[-1][0] != phase:
            return
        _, started = self._phases.pop()
        if self._outermost() in (OUTSIDE, SCHEDULE):  # a phase inside another one is a part of that one
            self._step.intervals.append((phase, started, self._clock.mark()))
            if len(self._step.intervals) > _MAX_INTERVALS:
                self._step.read_marks(self._clock)

    def wait_begins(self, axis: str, label: str) -> Any:
        """Returns the mark at the start of a wait for the ranks along ``axis``."""
        return self._clock.mark()

    def wait_ends(self, axis: str, mark: Any) -> None:
        """Records a wait for the ranks along ``axis`` that started at ``mark``."""
        self._step.waits.append((self._outermost(), axis, mark, self._clock.mark()))

    def _outermost(self) -> str:
        """Returns the open phase that time counts for: the outermost one that is not a schedule, else the schedule."""
        names = [name for name, _ in self._phases]
        return next((name for name in names if name != SCHEDULE), names[0] if names else OUTSIDE)

    # -- steps -------------------------------------------------------------------------------------------------------

    @override
    def add_tokens(self, count: int) -> None:
        self._tokens += count

    @override
    def end_step(self, info: StepInfo, loss: torch.Tensor | None) -> None:
        step, sent = self._step, _bytes_by_axis()
        step.ended = self._clock.mark()
        for index, (phase, started) in enumerate(self._phases):  # the update is inside the schedule
            if phase == SCHEDULE:
                step.intervals.append((phase, started, step.ended))
                self._phases[index] = (phase, step.ended)
        step.values = {
            "step": info.step,
            "samples": info.samples,
            "batch": info.batch,
            "skipped": info.skipped,
            "lr": info.lr[0] if info.lr else None,
            "norm": info.norm if info.norm is not None and math.isfinite(info.norm) else None,
            "loss_scale": info.loss_scale,
            "more": dict(info.more),
            "loss": loss,
            "tokens": self._tokens,
            "memory": get_accelerator().max_memory_allocated(),
            # The counter may have been set to zero in between.
            "bytes": {axis: count - min(self._sent.get(axis, 0), count) for axis, count in sent.items()},
        }
        self._tokens, self._sent = 0, sent
        self._step = _OpenStep(step.ended)
        self._writer.take(step)
        if self._after_step is not None:
            self._after_step(self, info.step)

    @override
    def take_memory(self, rows: Callable[[], Sequence[tuple[str, int, int, str]]]) -> None:
        if self._records_memory:
            self._records_memory = False
            self.event("memory", rows=list(rows()))

    @override
    def event(self, name: str, **values: Any) -> None:
        self._writer.file.write("event", name=name, **values)
        self.flush()

    def flush(self) -> None:
        """Flushes all lines to the file, where readers see them."""
        self._writer.file.flush()

    @override
    def close(self) -> None:
        if self._finish.alive:
            waiting.stop(self)
            self._finish()


def _bytes_by_axis() -> dict[str, int]:
    """Returns the bytes that this rank has sent so far, by axis."""
    total: dict[str, int] = defaultdict(int)
    for (_, axis), tally in traffic.ran_along.items():
        total[axis] += tally.nbytes
    return dict(total)


def _rounded(value: Any) -> Any:
    """Returns seconds rounded to microseconds, in dicts of any depth."""
    return {name: _rounded(inner) for name, inner in value.items()} if isinstance(value, dict) else round(value, 6)
