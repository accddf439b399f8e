"""Ends commands in one way when their standard output cannot be written."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any, TextIO, cast

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _WatchedOutput:
    """Passes all calls on to a stream, and keeps the last error of a write or flush."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.failure: OSError | None = None  # the error; None if all calls succeeded

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self.failure = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def run_and_flush(name: str, work: Callable[[], int | None]) -> int | None:
    """Calls ``work``, flushes standard output and returns the exit code; exits if nobody can read the output.

    Raises:
        SystemExit: The reader of the output, such as ``head``, has closed the pipe, or the disk is full.
        OSError: Any other file or connection that ``work`` uses failed.
    """
    if sys.stdout is None:  # its file was closed before the start
        return work()
    output = _WatchedOutput(sys.stdout)
    code: int | None = None
    try:
        try:
            with redirect_stdout(cast(TextIO, output)):
                code = work()
        finally:  # also after --help, which exits
            output.flush()
    except OSError as error:
        if error is not output.failure:
            raise
        if isinstance(error, BrokenPipeError):
            _discard_output()
            sys.exit(code or 1)
        if error.errno not in _UNWRITABLE:
            raise
        _discard_output()
        sys.exit(f"{name}: cannot write the output: {error.strerror}; make room, or write it to another disk")
    return code


def _discard_output() -> None:
    """Discards what is still to be flushed, at exit for example."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
