"""What a command is doing, and for how long, once it takes longer than one waits without wondering."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_SECONDS = 2.0
_REFRESH_SECONDS = 0.5
_LINE_SECONDS = 10.0  # between two lines where nothing can be rewritten


class Progress:
    """Says on stderr what is done: in one line that is rewritten on a terminal, in a line now and then in a file.

    Args:
        name: Of the command.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._what = ""
        self._started = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def doing(self, what: str) -> None:
        """What is done from now on."""
        self._what = what

    def start(self) -> None:
        """Begins to count."""
        self._thread.start()

    def stop(self) -> None:
        """Takes the line away."""
        self._is_over.set()
        self._thread.join()

    def _show(self) -> None:
        stream = sys.stderr
        on_terminal = stream.isatty()
        pause = PATIENCE_SECONDS
        while not self._is_over.wait(pause):
            text = f"{self._name}: {self._what} ... {time.monotonic() - self._started:.0f} s"
            if on_terminal:  # a line that wraps could not be taken away
                text = text[: shutil.get_terminal_size().columns - 1]
            stream.write(f"\r{text}\x1b[K" if on_terminal else f"{text}\n")
            stream.flush()
            pause = _REFRESH_SECONDS if on_terminal else _LINE_SECONDS
        if on_terminal and pause == _REFRESH_SECONDS:
            stream.write("\r\x1b[K")
            stream.flush()


@contextmanager
def progress(name: str) -> Iterator[Progress]:
    """Inside, what takes longer than two seconds shows that it works."""
    shown = Progress(name)
    shown.start()
    try:
        yield shown
    finally:
        shown.stop()
