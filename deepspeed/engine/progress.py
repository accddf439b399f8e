"""The engine's log of its steps: the line of ``steps_per_print``, phase times, events for the monitors.

The engine's own lines and events are made on rank 0, from numbers that the update has fetched from the device: no
collective and, without ``wall_clock_breakdown``, no synchronization.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.base.counters import waiting
from deepspeed.config.sections.root import Root
from deepspeed.engine.flops import FlopsCounter
from deepspeed.engine_feature import SCHEDULE, StepInfo, StepTracker
from deepspeed.logging import log_dist, log_dist_once
from deepspeed.monitor.monitor import Event, MonitorMaster
from deepspeed.profiling.timer import EngineTimers, NoopTimer

PHASES = ("forward", "backward", "step")


class ProgressLog:
    """Times phases, adds up losses, and reports both after each update."""

    def __init__(
        self,
        root: Root,
        monitor: MonitorMaster,
        is_rank_0: bool,
        trackers: Sequence[StepTracker] = (),
    ) -> None:
        every = root.steps_per_print
        self._every = 0 if every is None or math.isinf(every) or not is_rank_0 else int(every)
        self._monitor = monitor
        self._trackers = trackers
        self._breakdown = is_rank_0 and (root.wall_clock_breakdown or root.flops_profiler.enabled)
        self._memory = is_rank_0 and root.memory_breakdown
        self._collectives = is_rank_0 and root.comms_logger.enabled
        self._throughput = root.timers.throughput
        tracks_loss = any(tracker.uses_loss for tracker in trackers)
        self._needs_loss = is_rank_0 and (monitor.writes or self._every > 0 or tracks_loss)
        # whether anything reads the events of features
        self.uses_events = monitor.writes or any(tracker.uses_events for tracker in trackers)
        # whether this rank writes and logs nothing, so that :meth:`step` need not be called
        self.is_silent = not trackers and not (is_rank_0 and (monitor.writes or self._every or self._breakdown))
        self._watches = EngineTimers()
        self.timers: EngineTimers | NoopTimer = self._watches if self._breakdown else NoopTimer()
        self._stop_clock: Callable[[], Any] | None = None
        if self._breakdown:
            waiting.start()
            self._stop_clock = weakref.finalize(self, waiting.stop)  # runs even if close() is never called
        shows_mfu = (self._every > 0 and self._throughput.enabled) or any(tracker.uses_events for tracker in trackers)
        self._flops = FlopsCounter(is_rank_0 and shows_mfu)
        self._announces_flops = True
        self._tokens = self._micro_batches = 0  # of this update
        self._sequence_ranks = root.sequence_parallel_size
        self._loss: torch.Tensor | None = None
        self._waited_before = 0.0
        self._waited = dict.fromkeys(PHASES, 0.0)  # seconds of this update
        self._report = _Interval(time.perf_counter())
        self._since_update: float | None = None
        self._is_in_schedule = False

    def close(self) -> None:
        """Stops timing. May be called twice."""
        for tracker in self._trackers:
            tracker.close()
        if self._stop_clock is not None:
            self._stop_clock()

    # -- phases ------------------------------------------------------------------------------------------------------

    def before(self, phase: str) -> None:
        """Called when a phase begins. Times it under ``wall_clock_breakdown``, and for trackers."""
        self._report.enter()
        for tracker in self._trackers:
            tracker.begin(phase)
        if self._breakdown:
            watch = self._watches(phase)
            if watch.started:  # an exception left it running
                watch.started = False
            self._waited_before = waiting.seconds
            watch.start()

    def after(self, phase: str) -> None:
        """Called when a phase has ended."""
        self._report.leave()
        for tracker in reversed(self._trackers):
            tracker.end(phase)
        if self._breakdown and self._watches(phase).started:
            self._watches(phase).stop()
            self._waited[phase] += waiting.seconds - self._waited_before
        if self._memory:
            accelerator = get_accelerator()
            used, peak = accelerator.memory_allocated(), accelerator.max_memory_allocated()
            log_dist(f"memory after {phase}: {used / 2**20:,.0f} MiB in use, {peak / 2**20:,.0f} MiB at most")

    def loss(self, loss: torch.Tensor) -> None:
        """Adds a micro-batch's loss to that of the update; the sum stays on the device until the update ends.

        Args:
            loss: What is backpropagated, after the division by the accumulation steps and without the loss scale; it
                counts if it has one element, in any shape.
        """
        if self._needs_loss and loss.numel() == 1:
            part = loss.detach().float().reshape(())
            self._loss = part if self._loss is None else self._loss + part

    def inputs(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Counts the tokens of a training micro-batch."""
        if not self.is_silent:
            tokens = count_tokens(inputs, named)
            self._report.tokens += tokens
            self._report.micro_batches += 1
            self._tokens += tokens
            self._micro_batches += 1
            self._flops.before_forward(tokens or 1)
            for tracker in self._trackers:
                tracker.add_tokens(tokens)

    def counting(self, model: Any) -> AbstractContextManager[None]:
        """Returns a context in which a forward of ``model`` runs: operations of the first one are counted."""
        return self._flops.counting(model)

    @contextmanager
    def during(self, phase: str, **values: Any) -> Iterator[None]:
        """Records work outside of steps, such as a save, while the context is open."""
        started = time.perf_counter()
        with ExitStack() as stack:
            self._report.enter()
            stack.callback(self._report.leave)  # otherwise the time would count as data loading
            for tracker in self._trackers:
                stack.enter_context(tracker.during(phase))
            yield
        for tracker in self._trackers:
            tracker.event(phase, seconds=round(time.perf_counter() - started, 3), **values)

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """Records the instructions of a pipeline's stage, around the phases of its micro-batches."""
        self._is_in_schedule = True
        self._report.enter()
        try:
            with ExitStack() as stack:
                for tracker in self._trackers:
                    stack.enter_context(tracker.during(SCHEDULE))
                yield
        finally:
            self._report.leave()
            self._is_in_schedule = False

    def event(self, name: str, **values: Any) -> None:
        """Records an event outside of steps without a duration, such as a recovery."""
        for tracker in self._trackers:
            tracker.event(name, **values)

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Records a part of a phase, such as one micro-batch of a pipeline's stage, while the context is open."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.enter_context(tracker.named(name))
            yield

    def memory(self, rows: Callable[[], Sequence[tuple[str, int, int, str]]]) -> None:
        """Lets trackers read the memory held between two steps: ``rows`` returns ``engine.memory_report()``."""
        for tracker in self._trackers:
            tracker.take_memory(rows)

    # -- updates -----------------------------------------------------------------------------------------------------

    def step(self, facts: StepInfo) -> None:
        """Called after each update. Writes its events, and logs every ``steps_per_print`` updates."""
        self._report.enter()
        for tracker in self._trackers:
            tracker.end_step(facts, self._loss)
        self._report.leave()
        if self._is_in_schedule:
            self._report.leave()  # until here it belongs to this step
        self._announce_flops()
        is_time = self._every > 0 and facts.step % self._every == 0
        # Read only if it is shown, since reading makes the host wait for the device.
        loss = self._read_loss() if self._monitor.writes or is_time else None
        self._loss = None
        phases = self._phase_times()
        now = time.perf_counter()
        self._report.add(facts.batch, phases)
        if self._monitor.writes:
            self._monitor.write_events(self._events(facts, loss, phases, now))
        self._since_update = now
        if is_time:
            log_dist(self._line(facts, loss))
        if self._breakdown and (is_time or not self._every):
            log_dist(f"step {facts.step}: {self._report.breakdown(time.perf_counter())}")
        if self._collectives and is_time:
            comm.log_summary()
        if is_time or not self._every:
            self._report = _Interval(time.perf_counter())
        if self._is_in_schedule:
            self._report.enter()

    def _announce_flops(self) -> None:
        """Sends trackers, once, the model's number of operations, from which they compute the MFU."""
        tokens, units = self._tokens, self._tokens or self._micro_batches
        self._tokens = self._micro_batches = 0
        operations = self._flops.operations(units)
        if self._announces_flops and operations is not None:
            self._announces_flops = False
            self.event("operations", of_update=operations, tokens=tokens, device_flops=self._flops.peak)

    def _read_loss(self) -> float | None:
        if self._loss is None:
            log_dist_once(
                "the loss is missing in monitors and log lines: the engine does not see it if the program "
                "calls loss.backward(). Write engine.scale(loss).backward(), or engine.backward(loss)"
            )
            return None
        return float(self._loss)

    def _phase_times(self) -> dict[str, tuple[float, float]]:
        """Returns the milliseconds of each phase of this update: in total, and waiting for other ranks."""
        if not self._breakdown:
            return {}
        times = {}
        for phase in PHASES:
            times[phase] = (self._watches(phase).elapsed(reset=True), self._waited[phase] * 1e3)
            self._waited[phase] = 0.0
        return times

    def _events(
        self, facts: StepInfo, loss: float | None, phases: dict[str, tuple[float, float]], now: float
    ) -> list[Event]:
        values: list[tuple[str, float | None]] = [
            ("train_loss", loss),
            ("lr", facts.lr[0] if facts.lr else None),
            ("loss_scale", facts.loss_scale),
            ("grad_norm", facts.norm),
            *facts.more,
        ]
        if self._throughput.enabled and self._since_update is not None:
            values.append(("samples_per_sec", facts.batch / max(now - self._since_update, 1e-9)))
        for phase, (total, waited) in phases.items():
            values.append((f"elapsed_time_ms_{phase}", total))
            if phase == "backward":
                values.append(("elapsed_time_ms_backward_inner", total - waited))
                values.append(("elapsed_time_ms_backward_allreduce", waited))
        return [(f"Train/Samples/{name}", value, facts.samples) for name, value in values if value is not None]

    def _line(self, facts: StepInfo, loss: float | None) -> str:
        parts = [f"step {facts.step:6d}"]
        if loss is not None:
            parts.append(f"loss {loss:.4g}".ljust(len("loss 0.0012345")))
        if self._throughput.enabled:
            if self._throughput.synchronized:
                get_accelerator().synchronize()
            now = time.perf_counter()
            samples = self._report.per_second(self._report.samples, now)
            parts.append(f"{samples:8,.1f} samples/s")
            if self._report.tokens:  # this rank's tokens, assuming that the other ranks' samples are as long
                tokens = self._report.tokens / facts.own_batch * facts.batch * self._sequence_ranks
                parts.append(f"{self._report.per_second(tokens, now):11,.0f} tokens/s")
            share = self._flops.share(self._report.per_second(self._report.tokens or self._report.micro_batches, now))
            parts.append("MFU     -" if share is None else f"MFU {share:5.1%}")
            parts.append(f"data {self._report.outside_share(now):3.0%}")
        parts.append(f"{get_accelerator().max_memory_allocated() / 2**30:6.2f} GiB")
        rates = f"lr [{', '.join(f'{value:.3g}' for value in facts.lr)}]"
        parts.append(rates.ljust(len("lr") + len(" [0.00012]") * max(len(facts.lr), 1)))
        if facts.norm is not None:
            parts.append(f"gradient norm {facts.norm:<8.3g}")
        if facts.loss_scale is not None:
            parts.append(f"loss scale {facts.loss_scale:<11g}")
        return " | ".join([*parts, f"{facts.skipped:3d} skipped"])


class _Interval:
    """Totals of the steps since the latest line.

    Attributes:
        samples: Over all ranks.
        tokens: Tokens of this rank.
        micro_batches: Micro-batches of this rank.
    """

    def __init__(self, since: float) -> None:
        self.samples = self.tokens = self.micro_batches = 0
        self._started = since
        self._updates = 0
        self._depth = 0  # number of open phases
        self._entered = 0.0
        self._inside = 0.0  # seconds in phases
        self._phases = dict.fromkeys(PHASES, (0.0, 0.0))

    def add(self, samples: int, phases: dict[str, tuple[float, float]]) -> None:
        self.samples += samples
        self._updates += 1
        self._depth = 0  # an exception may have left a phase open
        for phase, (total, waited) in phases.items():
            so_far = self._phases[phase]
            self._phases[phase] = (so_far[0] + total, so_far[1] + waited)

    def enter(self) -> None:
        """Called when a phase begins."""
        if self._depth == 0:
            self._entered = time.perf_counter()
        self._depth += 1

    def leave(self) -> None:
        """Called when a phase has ended."""
        self._depth -= 1
        if self._depth == 0:
            self._inside += time.perf_counter() - self._entered

    def per_second(self, count: float, now: float) -> float:
        """Returns a count of this interval as a rate."""
        return count / max(now - self._started, 1e-9)

    def outside_share(self, now: float) -> float:
        """Returns the share of the time outside calls of the engine: data and the program's own code."""
        return max(1 - self._inside / max(now - self._started, 1e-9), 0.0)

    def breakdown(self, now: float) -> str:
        """Returns a text with each phase's milliseconds per update and share, and those outside (data, evaluation)."""
        whole = (now - self._started) * 1e3
        outside = max(whole - sum(total for total, _ in self._phases.values()), 0.0)
        parts = []
        for phase, (total, waited) in [*self._phases.items(), ("outside", (outside, 0.0))]:
            text = f"{phase} {total / self._updates:.1f} ({total / max(whole, 1e-9):.0%}"
            parts.append(f"{text}, {waited / self._updates:.1f} waiting)" if waited > 0 else f"{text})")
        return f"time (ms per update) | {' | '.join(parts)} | over {self._updates} update(s)"


def count_tokens(inputs: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """Returns the number of tokens of a forward: of ``input_ids``, else of the first 2-D integer tensor."""
    for value in (named.get("input_ids"), *inputs):
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
            return value.numel()
    return 0
