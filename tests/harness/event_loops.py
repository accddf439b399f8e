"""Makes gloo's event loops block on a held lock instead of spinning.

gloo's thread for a group's sockets tries the lock of a connection and, while another thread holds it, asks the kernel
again at once (https://github.com/pytorch/gloo/issues/246). Where there are fewer cores than ranks, the holder often is
a thread that the kernel has put off at the end of its send, so the loop spins through one time slice after the other:
half of the processor time of a small training on three ranks and two cores. ``event_loop.c`` lets such a thread wait
for the lock for up to 2 ms, then fail as before. It is compiled where Linux has a C compiler; without one, ranks run as
gloo is. So do those of ``run_ranks(..., fresh="interpreter")`` everywhere: no test but these has gloo and malloc as
users have them (with ``LD_PRELOAD``, ``keep_freed_memory`` leaves malloc alone).
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).with_name("event_loop.c")
LIBRARY = "event_loop.so"


def let_them_wait() -> None:
    """Loads ``event_loop.c`` into all processes that this one starts from now on, as long as it runs."""
    compiler, others = shutil.which("cc"), os.environ.get("LD_PRELOAD", "")
    if sys.platform != "linux" or compiler is None or LIBRARY in others:
        return
    folder = tempfile.mkdtemp(prefix="event-loops-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library = os.path.join(folder, LIBRARY)
    command = [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", library, str(SOURCE), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        os.environ["LD_PRELOAD"] = f"{library}:{others}".rstrip(":")
    else:
        warnings.warn(f"{SOURCE.name} does not compile, so gloo's event loops spin: {done.stderr}", stacklevel=2)


def without_library(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment whose ``LD_PRELOAD`` lacks the library, and the rest of ``environ``."""
    kept = [path for path in environ.get("LD_PRELOAD", "").split(":") if path and not path.endswith(LIBRARY)]
    others = {name: value for name, value in environ.items() if name != "LD_PRELOAD"}
    return {**others, "LD_PRELOAD": ":".join(kept)} if kept else others
