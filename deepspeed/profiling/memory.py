"""How much memory is in use, for logs."""

from __future__ import annotations

import psutil

from deepspeed.accelerator import get_accelerator
from deepspeed.logging import log_dist

_GIB = 2**30


def memory_line() -> str:
    """Device memory (allocated, peak, reserved, peak) and host memory of this moment, in GiB."""
    device = get_accelerator()
    host = psutil.virtual_memory()
    resident = psutil.Process().memory_info().rss
    return (
        f"device allocated {device.memory_allocated() / _GIB:.2f} GiB, peak {device.max_memory_allocated() / _GIB:.2f}"
        f" GiB, reserved {device.memory_reserved() / _GIB:.2f} GiB, peak {device.max_memory_reserved() / _GIB:.2f} GiB"
        f" | host: this process {resident / _GIB:.2f} GiB, all {host.used / _GIB:.2f} GiB ({host.percent:.1f}%)"
    )


def see_memory_usage(message: str, force: bool = False) -> None:
    """Logs ``message`` and the memory in use on rank 0, then starts the peaks afresh.

    Args:
        message: What has just happened.
        force: Log at all; without it the call does nothing, so that calls can stay in the program.
    """
    if not force:
        return
    log_dist(f"{message} | {memory_line()}")
    get_accelerator().reset_peak_memory_stats()
