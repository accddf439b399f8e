"""What the engine says while training: a line each ``steps_per_print`` steps, phase times, on rank 0 only."""

from __future__ import annotations

import math
import time
from collections import defaultdict

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.config.sections.root import Root
from deepspeed.logging import log_dist


class ProgressLog:
    """Counts time and samples.

    Args:
        root: The configuration (``steps_per_print``, ``wall_clock_breakdown``, ``timers``).
        batch: Samples per update.
    """

    def __init__(self, root: Root, batch: int) -> None:
        every = root.steps_per_print
        self._every = 0 if every is None or math.isinf(every) else int(every)
        self._breakdown = root.wall_clock_breakdown
        self._memory = root.memory_breakdown
        self._batch = batch
        self._since = time.perf_counter()
        self._steps_since = 0
        self._phases: dict[str, float] = defaultdict(float)
        self._started: dict[str, float] = {}

    def before(self, phase: str) -> None:
        """A phase begins; timed only under ``wall_clock_breakdown``."""
        if self._breakdown:
            self._started[phase] = self._now()

    def after(self, phase: str) -> None:
        """A phase has ended."""
        if self._breakdown and phase in self._started:
            self._phases[phase] += self._now() - self._started.pop(phase)
        if self._memory:
            accelerator = get_accelerator()
            used, peak = accelerator.memory_allocated(), accelerator.max_memory_allocated()
            log_dist(f"memory after {phase}: {used / 2**20:,.0f} MiB in use, {peak / 2**20:,.0f} MiB at most")

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(self, step: int, skipped: int, lr: list[float], norm: float | None) -> None:
        """An update is done: log if it is time to."""
        self._steps_since += 1
        if self._breakdown and (not self._every or step % self._every == 0):
            times = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in self._phases.items())
            log_dist(f"step {step}: time in ms since the last report: {times}")
            self._phases.clear()
        if self._every and step % self._every == 0:
            now = time.perf_counter()
            rate = self._steps_since * self._batch / max(now - self._since, 1e-9)
            rates = ", ".join(f"{value:.3g}" for value in lr)
            log_dist(
                f"step {step}: {rate:.1f} samples/s, lr [{rates}], gradient norm {norm or 0.0:.3g}, {skipped} skipped"
            )
            self._since, self._steps_since = now, 0
