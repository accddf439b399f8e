"""At exit, waits until gloo's threads have released the program's tensors.

A thread of gloo that has carried out a collective says so first and drops its tensors then. If it is held up in
between, as on a machine with more to do than processors, the program may have come to its end meanwhile; a tensor that
Python knows can then be dropped no more, as the interpreter has gone, and the process is ended by signal 6, after all
its work is done. Torch waits for these threads where the last reference to a group goes before the program ends, but
engines and wrapped models keep theirs.
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

_THREADS = Path("/proc/self/task")  # of Linux; elsewhere nothing is known of threads
_NAME = "pt_gloo"  # begins the names of threads that run collectives
_LOOK = 0.001  # seconds between looks, in which such a thread may have the interpreter
_PATIENCE = 5.0  # seconds


@functools.cache
def drain_gloo_at_exit() -> None:
    """Makes this process wait, when its program has ended. Once is enough."""
    atexit.register(wait_for_gloo_threads)


def wait_for_gloo_threads() -> None:
    """Returns when no thread of gloo computes: all wait for something, be it for other ranks."""
    deadline = time.monotonic() + _PATIENCE
    while any(map(_computes, _tasks())) and time.monotonic() < deadline:
        time.sleep(_LOOK)


def _tasks() -> list[Path]:
    try:
        return list(_THREADS.iterdir())
    except OSError:
        return []


def _computes(task: Path) -> bool:
    """Whether it is a thread of gloo, and runs or would if there were a processor for it."""
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return False
    return name.startswith(_NAME) and rest.split()[0] == "R"
