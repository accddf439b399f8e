"""Runs an action when this process ends: at the end of the program, on an error, and on a signal that ends it."""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import FrameType

# Signals that launchers and schedulers send, and that end a process which does not handle them. Ctrl-C is an exception.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class ExitAction:
    """Calls ``action`` once, when this process ends; never in a process that is forked from it.

    Args:
        on_signals: Whether signals that end the process run it too. Signals that the program handles are left to it,
            and so are all of them where the caller is not the main thread, as Python handles signals only there.
    """

    def __init__(self, action: Callable[[], None], *, on_signals: bool = False) -> None:
        self._action: Callable[[], None] | None = action
        self._process = os.getpid()
        atexit.register(self._run)
        # A process that multiprocessing has forked ends without the functions of atexit (before Python 3.13).
        self._of_fork = Finalize(None, self._run, exitpriority=0)
        self._handled: list[signal.Signals] = []
        if on_signals and threading.current_thread() is threading.main_thread():
            self._handled = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
        for number in self._handled:
            signal.signal(number, self._on_signal)

    def cancel(self) -> None:
        """Drops the action, and gives its signals their default effect again."""
        self._action = None
        atexit.unregister(self._run)
        self._of_fork.cancel()
        if threading.current_thread() is threading.main_thread():
            for number in self._handled:
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, signal.SIG_DFL)

    def _run(self) -> None:
        action, self._action = self._action, None
        if action is not None and os.getpid() == self._process:
            action()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:
            self._run()
        finally:
            signal.raise_signal(number)
