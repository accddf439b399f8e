"""Keeping gloo's event loops from taking the processor of those who hold what they wait for.

gloo's thread for a group's sockets tries the lock of a connection and, while another thread holds it, asks the kernel
again at once (https://github.com/pytorch/gloo/issues/246). Where there are fewer cores than ranks, the holder often is
a thread that has just been interrupted in favour of such a loop: two ranks on two cores spent half of their processor
time so. A loop of lower priority lets the holder go on first.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

NICENESS = 10
"""Above that of the other threads: enough to stand back, too little to starve on a machine full of other work."""


def lower_priority() -> None:
    """Makes every process group that this process starts from now on have event loops of lower priority. Linux only."""
    from torch.distributed import distributed_c10d

    start = distributed_c10d._new_process_group_helper

    def start_and_lower(*args: Any, **kwargs: Any) -> Any:
        group = start(*args, **kwargs)
        for task in threads():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended since it was listed
                lower_if_event_loop(task)
        return group

    distributed_c10d._new_process_group_helper = start_and_lower


def threads() -> list[Path]:
    """Lists the folders in ``/proc`` of the threads of this process."""
    return list(Path("/proc/self/task").glob("*"))


def lower_if_event_loop(task: Path) -> None:
    """Lowers the priority of the thread whose folder in ``/proc`` is ``task`` if it is an event loop of gloo.

    Raises:
        OSError: The thread has ended.
    """
    if (task / "comm").read_text() == "gloo_tcp_loop\n":
        os.setpriority(os.PRIO_PROCESS, int(task.name), NICENESS)
