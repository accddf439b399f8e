"""Keeping gloo's event loops from spinning while another thread holds what they wait for.

gloo's thread for a group's sockets tries the lock of a connection and, while another thread holds it, asks the kernel
again at once (https://github.com/pytorch/gloo/issues/246). Where there are fewer cores than ranks, the holder often is
a thread that the kernel has put off at the end of its send, so the loop spins through one time slice after the other:
half of the processor time of a small training on three ranks and two cores. ``event_loop.c`` lets such a thread wait
for the lock for up to 2 ms, then fail as before. It is compiled where Linux has a C compiler; without one, ranks run as
gloo is.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

SOURCE = Path(__file__).with_name("event_loop.c")


def preload(environ: dict[str, str]) -> dict[str, str]:
    """Returns the environment of a process whose event loops wait, or ``environ`` where the library cannot be made."""
    library = _library()
    if library is None:
        return environ
    return {**environ, "LD_PRELOAD": ":".join(filter(None, (str(library), environ.get("LD_PRELOAD"))))}


def remove() -> None:
    """Deletes the library. The next call of :func:`preload` makes it again."""
    library = _library() if _library.cache_info().currsize else None
    if library is not None:
        shutil.rmtree(library.parent)
    _library.cache_clear()


@functools.cache
def _library() -> Path | None:
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        return None
    folder = tempfile.mkdtemp(prefix="event-loops-")
    library = Path(folder, "event_loop.so")
    command = [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", str(library), str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        warnings.warn(f"{SOURCE.name} does not compile, so gloo's event loops spin: {done.stderr}", stacklevel=1)
        return None
    return library
