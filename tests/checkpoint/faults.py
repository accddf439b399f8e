"""Failing and dying at a chosen file operation of a save."""

import errno
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.checkpoint import disk

OPERATIONS = ("open", "write", "fsync", "rename", "replace", "makedirs")


class CountingOs:
    """Stands in for ``os`` in the module that changes files; acts at the operation number ``at``.

    Args:
        at: Which operation, from 0; None only counts.
        act: ``fail`` raises "no space left", ``before`` and ``after`` kill the process on either side of it, ``half``
            writes half of the bytes and then kills.
    """

    def __init__(self, at: int | None, act: str) -> None:
        self.count = 0
        self.names: list[str] = []
        self._lock = threading.Lock()
        self._at = at
        self._act = act

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in OPERATIONS:
            return real

        def operation(*args: Any, **kwargs: Any) -> Any:
            with self._lock:  # files are synced by a second thread
                number, self.count = self.count, self.count + 1
                self.names.append(name)
            if number != self._at:
                return real(*args, **kwargs)
            if self._act == "fail":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._act == "half" and name == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            if self._act == "after":
                real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        return operation


@contextmanager
def faults(at: int | None, act: str = "fail") -> Iterator[CountingOs]:
    """Inside the block file operations are counted, and one of them fails."""
    counting = CountingOs(at, act)
    disk.os = counting
    try:
        yield counting
    finally:
        disk.os = os
