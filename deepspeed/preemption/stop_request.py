"""The signals by which a scheduler says that a process will be ended."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from deepspeed.errors import DeepSpeedConfigError


class StopRequest:
    """Remembers the first of some signals until the step is over. A second one does what it did before.

    Args:
        names: Signals, such as ``SIGTERM``.

    Attributes:
        reason: Name of the signal that came; None as long as none has.

    Raises:
        DeepSpeedConfigError: This is not the main thread, in which alone Python handles signals.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise DeepSpeedConfigError(
                "preemption.enabled: expected initialize in the main thread, where Python handles signals, found "
                f"thread {threading.current_thread().name!r}; call it there, or disable the section"
            )
        self.reason: str | None = None
        self._before: dict[int, Any] = {}
        for name in names:
            number = signal.Signals[name]
            self._before[number] = signal.signal(number, self._remember)

    def _remember(self, number: int, _frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name
        # A second signal ends the process without waiting for the end of the step.
        signal.signal(number, self._before.pop(number))

    def release(self) -> None:
        """Gives signals that have not come back to who handled them before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._remember:
                signal.signal(number, handler)
        self._before.clear()
