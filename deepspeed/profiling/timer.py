"""Wall-clock timers that synchronize with the device, and the throughput log of the training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import NotYetSupportedError
from deepspeed.logging import log_dist

# Upstream's names of an engine's timers. Here one timer measures each phase (see NAMES_OF_PHASES).
FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce_microstep", "bwd_allreduce"
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"
NAMES_OF_PHASES = {
    FORWARD_MICRO_TIMER: "forward",
    FORWARD_GLOBAL_TIMER: "forward",
    BACKWARD_MICRO_TIMER: "backward",
    BACKWARD_GLOBAL_TIMER: "backward",
    STEP_MICRO_TIMER: "step",
}


def _now(synchronize: bool = True) -> float:
    if synchronize:
        get_accelerator().synchronize()
    return time.perf_counter()


class Stopwatch:
    """Measures one named total time. Times are returned in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name = name  # its name in the log
        self.started = False  # whether it is running
        self.records: list[float] = []  # the time of each :meth:`stop` with ``record=True``, in milliseconds
        self._total = 0.0
        self._started = 0.0

    def start(self, synchronize: bool = True) -> None:
        """Starts, with ``synchronize`` after waiting for the device. Raises RuntimeError: it is running already."""
        if self.started:
            raise RuntimeError(f"timer {self.name!r} is running already; stop it before starting it again")
        self._started = _now(synchronize)
        self.started = True

    def stop(self, reset: bool = False, record: bool = False, synchronize: bool = True) -> None:
        """Stops the timer and adds the interval to its total. ``reset``: replace the total instead of adding to it.

        Raises:
            RuntimeError: The timer is not running.
        """
        if not self.started:
            raise RuntimeError(f"timer {self.name!r} is not running; start it before stopping it")
        passed = _now(synchronize) - self._started
        self._total = passed if reset else self._total + passed
        if record:
            self.records.append(passed * 1e3)
        self.started = False

    def reset(self) -> None:
        """Stops the timer and clears its total and records."""
        self.started = False
        self._total = 0.0
        self.records.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Returns the total in milliseconds, the running interval included; ``reset`` sets it to zero."""
        running = self.started
        if running:
            self.stop()
        total = self._total * 1e3
        if reset:
            self._total = 0.0
        if running:
            self.start(synchronize=False)
        return total

    def mean(self) -> float:
        """Returns the mean of ``records`` in ms without the fastest and slowest tenth; 0 if there are none."""
        ordered = sorted(self.records)
        tenth = len(ordered) // 10
        middle = ordered[tenth : len(ordered) - tenth]
        return sum(middle) / len(middle) if middle else 0.0


class SynchronizedWallClockTimer:
    """Holds timers by name: ``timers("forward").start()``."""

    Timer = Stopwatch

    def __init__(self) -> None:
        self.timers: dict[str, Stopwatch] = {}

    def __call__(self, name: str) -> Stopwatch:
        """Returns the timer of that name; the first call creates it."""
        return self.timers.setdefault(name, Stopwatch(name))

    def has_timer(self, name: str) -> bool:
        """Returns whether there is a timer of that name."""
        return name in self.timers

    def get_timers(self) -> dict[str, Stopwatch]:
        """Returns all timers by name."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Returns a line about the memory in use."""
        return memory_line()

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: list[int] | None = None,
    ) -> None:
        """Logs totals of known timers over ``normalizer`` in milliseconds, on ``ranks`` (None: rank 0).

        Raises:
            ValueError: ``normalizer`` is not above 0.
        """
        if normalizer <= 0:
            raise ValueError(f"log(normalizer={normalizer}): must be above 0; use for example the number of steps")
        parts = [f"{n}: {self.timers[n].elapsed(reset) / normalizer:.2f}" for n in names if n in self.timers]
        log_dist("time (ms) | " + " | ".join(parts), ranks)
        if memory_breakdown:
            log_dist(memory_line(), ranks)

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Returns :meth:`Stopwatch.mean` of some timers by name, divided by ``normalizer``.

        Raises:
            ValueError: ``normalizer`` is not above 0.
        """
        if normalizer <= 0:
            raise ValueError(f"get_mean(normalizer={normalizer}): must be above 0; use for example the number of steps")
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means


class EngineTimers(SynchronizedWallClockTimer):
    """The timers of an engine's phases, also under upstream's names."""

    def __call__(self, name: str) -> Stopwatch:
        """Returns a timer. Raises NotYetSupportedError: upstream's name of a part of the backward, not measured."""
        if name.startswith(("bwd_inner", "bwd_allreduce")):
            raise NotYetSupportedError(
                f"engine.timers({name!r}): the parts of a backward have no timers of their own; use "
                "engine.timers('backward'), or record a trace (ds_trace)"
            )
        return super().__call__(NAMES_OF_PHASES.get(name, name))


class NoopTimer:
    """Accepts the calls of :class:`SynchronizedWallClockTimer` and measures nothing."""

    class Timer:
        """Accepts the calls of :class:`Stopwatch`."""

        def start(self, *_args: Any, **_options: Any) -> None:
            """Does nothing."""

        stop = reset = start

        def elapsed(self, *_args: Any, **_options: Any) -> float:
            """Returns 0: nothing is measured."""
            return 0.0

        mean = elapsed

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> NoopTimer.Timer:
        """Returns the same idle timer for every name."""
        return self.timer

    def has_timer(self, name: str) -> bool:
        """Returns True for every name."""
        return True

    def get_timers(self) -> dict[str, Any]:
        """Returns an empty dict."""
        return {}

    def log(self, names: Iterable[str], *_args: Any, **_options: Any) -> None:
        """Does nothing."""

    def get_mean(self, names: Iterable[str], *_args: Any, **_options: Any) -> dict[str, float]:
        """Returns an empty dict."""
        return {}


class ThroughputTimer:
    """Measures the samples per second of the training loop: ``start()`` before each micro-batch, ``stop()`` after it.

    Args:
        config: An object with ``enabled`` and ``synchronized`` (``timers.throughput`` of the configuration).
        batch_size: Samples of one global step over all ranks.
        start_step: Number of first global steps that are not measured, in which caches are filled.
        steps_per_output: Number of global steps between two lines; None: no lines.
        logging_fn: Called with the line; None: the package logger on rank 0.

    Attributes:
        initialized: Whether it was ever started.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: float | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self.batch_size = max(1, batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.monitor_memory = monitor_memory
        self.logging = logging_fn or log_dist
        self.started = self.initialized = False
        self.epoch_count = 0
        self.micro_step_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0  # seconds since start_step
        self.step_elapsed_time = 0.0  # seconds of the present global step
        self._started = 0.0
        self._output_time = 0.0  # seconds since the latest line
        self._output_steps = 0

    @property
    def enabled(self) -> bool:
        """Whether anything is measured."""
        return bool(self.config.enabled)

    def update_epoch_count(self) -> None:
        """Counts an epoch and sets the number of micro-steps to 0."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Starts the time of a micro-batch."""
        if not self.enabled:
            return
        self.started = self.initialized = True
        if self.global_step_count >= self.start_step:
            self._started = _now(self.config.synchronized)

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Ends the time of a micro-batch."""
        if not self.enabled or not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        if self.global_step_count >= self.start_step:
            passed = _now(self.config.synchronized) - self._started
            self.total_elapsed_time += passed
            self.step_elapsed_time += passed
        if not global_step:
            return
        self.global_step_count += 1
        self._output_time += self.step_elapsed_time
        self.step_elapsed_time = 0.0
        if self.global_step_count > self.start_step:
            self._output_steps += 1
            if report_speed and self.steps_per_output and self.global_step_count % self.steps_per_output == 0:
                self._report()

    def _report(self) -> None:
        recent = self.batch_size * self._output_steps / self._output_time if self._output_time else 0.0
        line = (
            f"epoch {self.epoch_count}, micro step {self.micro_step_count}, step {self.global_step_count}: "
            f"{recent:.2f} samples/s, {self.avg_samples_per_sec():.2f} on average"
        )
        self.logging(f"{line} | {memory_line()}" if self.monitor_memory else line)
        self._output_time, self._output_steps = 0.0, 0

    def avg_samples_per_sec(self) -> float:
        """Returns the samples per second of all whole steps since ``start_step``; minus infinity before the first."""
        steps, seconds = self.global_step_count - self.start_step, self.total_elapsed_time - self.step_elapsed_time
        return float("-inf") if steps <= 0 or seconds <= 0 else self.batch_size * steps / seconds


_GIB = 2**30


def memory_line() -> str:
    """Returns a line with device memory (allocated, reserved, and their peaks) and host memory, in GiB."""
    device = get_accelerator()
    host = psutil.virtual_memory()
    resident = psutil.Process().memory_info().rss
    return (
        f"device allocated {device.memory_allocated() / _GIB:.2f} GiB, peak {device.max_memory_allocated() / _GIB:.2f}"
        f" GiB, reserved {device.memory_reserved() / _GIB:.2f} GiB, peak {device.max_memory_reserved() / _GIB:.2f} GiB"
        f" | host: this process {resident / _GIB:.2f} GiB, all {host.used / _GIB:.2f} GiB ({host.percent:.1f}%)"
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """With ``force``, logs ``message`` and the memory in use on rank 0, then resets the peaks."""
    if not force:
        return
    log_dist(f"{message} | {memory_line()}")
    get_accelerator().reset_peak_memory_stats()
