"""The engine feature of the section ``preemption``: saves and exits after a step in which a rank got a stop signal."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from time import monotonic
from types import FrameType
from typing import Any

from typing_extensions import override

from deepspeed.checkpoint.exchange import Exchange
from deepspeed.config.sections.checkpoint import CATCHABLE, SIGNAL_VARIABLE, Preemption
from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.zero.runtime import ZeroRuntime

# Longer than a launcher on a busy machine needs to forward a signal.
_ONE_SIGNAL_SECONDS = 5.0


class StopRequest:
    """Records the first signal received, so that the step can end. A repeated signal has its original effect.

    Slurm signals all processes of a step, and a launcher among them forwards the signal: signals within a few seconds
    count as one.

    Args:
        names: Names of the signals, such as ``SIGTERM``.

    Raises:
        DeepSpeedConfigError: The caller is not the main thread; Python handles signals only there.
    """

    def __init__(self, names: Sequence[str]) -> None:
        _refuse_other_threads()
        self.reason: str | None = None  # name of the first signal received; None before that
        self._before: dict[int, Any] = {}
        self._first_at: dict[int, float] = {}  # seconds on the monotonic clock
        for name in names:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        now = monotonic()
        if now - self._first_at.setdefault(number, now) < _ONE_SIGNAL_SECONDS:
            return
        # A second signal ends the process without waiting for the end of the step.
        signal.signal(number, self._before.pop(number))
        signal.raise_signal(number)

    def release(self) -> None:
        """Restores the previous handlers, unless the program has set others since."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._remember:
                signal.signal(number, handler)
        self._before.clear()


def _refuse_other_threads() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise DeepSpeedConfigError(
            "preemption.enabled: expected initialize in the main thread, where Python handles signals, found "
            f"thread {threading.current_thread().name!r}; call it there, or disable the section"
        )


def signals_of(section: Preemption, further: str) -> list[str]:
    """Returns the names of the signals that end a run: those of the configuration, and that of ``deepspeed --signal``.

    Args:
        further: Value of the variable ``SIGNAL_VARIABLE``, which the launcher sets; empty: not set.

    Raises:
        DeepSpeedConfigError: ``further`` is not the name of a signal that a program can handle.
    """
    if further and further not in CATCHABLE:
        raise DeepSpeedConfigError(
            f"{SIGNAL_VARIABLE}={further}: expected the name of a signal that a program can handle; use for "
            "example SIGUSR1"
        )
    return list(dict.fromkeys([*section.signals, *([further] if further else [])]))


class PreemptionHooks(EngineHooks):
    """Saves a checkpoint and ends the run after the step in which a rank received a stop signal."""

    def __init__(self, section: Preemption) -> None:
        assert section.save_dir is not None, "the configuration requires save_dir"
        self._section = section
        self._folder = os.path.abspath(section.save_dir)
        self._signals = signals_of(section, os.environ.get(SIGNAL_VARIABLE, ""))
        self._request: StopRequest | None = None  # until begin(): initialize may still fail
        self._exchange: Exchange | None = None
        self._engine: Any = None

    def begin(self, engine: Any) -> None:
        """Waits for signals from now on, and loads the last checkpoint of ``preemption.save_dir`` if ``resume`` is set.

        All ranks must call it.
        """
        self._engine = engine
        self._request = StopRequest(self._signals)
        try:
            self._resume(engine)
        except BaseException:
            self._request.release()
            raise

    def _resume(self, engine: Any) -> None:
        self._exchange = Exchange.between(engine._parts.setup.job.axis_of())
        found = self._exchange.gather(os.path.isdir(self._folder), "the search for a checkpoint (preemption)")
        if self._section.resume and any(found):
            folder, _ = engine.load_checkpoint(self._folder)
            if folder is not None:
                log_dist(f"preemption: resumes from {folder}, after step {engine.global_steps}")

    @override
    def after_step(self, global_steps: int) -> None:
        assert self._exchange is not None and self._request is not None, "begin() was not called"
        own_reason = self._request.reason
        reasons_by_rank = self._exchange.gather(
            None if own_reason is None else f"{own_reason} on rank {self._exchange.rank} (host {socket.gethostname()})",
            "the check for stop signals (preemption)",
        )
        reasons = [reason for reason in reasons_by_rank if reason is not None]
        if reasons:
            started = monotonic()
            self._engine.save_checkpoint(self._folder, async_save=False)
            seconds = monotonic() - started
            log_dist(
                f"preemption: {reasons[0]} after step {global_steps}; saved to {self._folder} in {seconds:.1f} s; exit "
                f"code {self._section.exit_code}: start the same command again to resume"
            )
            self.close()
            sys.exit(self._section.exit_code)

    @override
    def close(self) -> None:
        if self._request is not None:
            self._request.release()


class PreemptionFeature(EngineFeature):
    """Lets a scheduler end a run and start it again."""

    title = "preemption"
    setting = "preemption"

    @override
    def refuse(self, setup: EngineSetup) -> None:
        if setup.root.preemption is not None and setup.root.preemption.enabled:
            _refuse_other_threads()

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Any, batch_size: int) -> EngineHooks | None:
        section = setup.root.preemption
        return PreemptionHooks(section) if section is not None and section.enabled else None

    @override
    def finish(self, engine: Any, training_data: Any) -> None:
        hooks = engine._hooks.get(__name__)
        if hooks is not None:
            hooks.begin(engine)


FEATURE = PreemptionFeature()
