"""Reads the memory of the host and of this process, in bytes.

The memory limit of a container counts as the machine's memory: the kernel kills a process that exceeds it, even if the
host has free memory.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int:
    """Returns the memory of this process that is in RAM now, in bytes."""
    return int(psutil.Process().memory_info().rss)


class PeakResidentMemory:
    """Measures the peak of :func:`resident_bytes`.

    On Linux the kernel counts the exact peak. Without it, or if it cannot be reset, the peak is the largest value that
    a call of this object has read.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._kernel_counts = _kernel_peak() is not None

    def read(self) -> int:
        """Returns the peak since the start of the process or the last :meth:`reset`."""
        peak = _kernel_peak() if self._kernel_counts else None
        self._seen = max(self._seen, resident_bytes() if peak is None else peak)
        return self._seen

    def reset(self) -> None:
        """Resets the peak to the current value."""
        if self._kernel_counts:
            try:
                _CLEAR_REFS.write_text("5")  # proc(5): resets VmHWM to the present VmRSS
            except OSError:  # not permitted in some sandboxes: use the values that calls read
                self._kernel_counts = False
        self._seen = 0
        self.read()


def _kernel_peak() -> int | None:
    if not _STATUS.exists():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def total_bytes() -> int:
    """Returns the RAM that this process may use, in bytes: the machine's, or the container's limit if that is lower."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_limits())])


def available_bytes() -> int:
    """Returns the bytes of RAM that can be allocated without swapping or passing the container's limit."""
    headroom = [max(0, limit - used) for limit, used in _cgroup_limits()]
    return min([int(psutil.virtual_memory().available), *headroom])


def shared_memory_bytes() -> tuple[int, int] | None:
    """Returns the size and the free bytes of ``/dev/shm``; None where there is none."""
    if not os.path.isdir("/dev/shm"):
        return None
    usage = psutil.disk_usage("/dev/shm")
    return int(usage.total), int(usage.free)


def _cgroup_limits(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[tuple[int, int]]:
    """Returns ``(limit, used)`` of each memory cgroup of this process with a limit; used excludes reclaimable cache."""
    if not membership.exists():
        return []
    found = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's and not exist here; its own group is then the root.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            found += _read_limit(folder, *names)
            if folder == base:
                break
    return found


def _read_limit(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> list[tuple[int, int]]:
    limit_file, usage_file, stat_file = folder / limit_name, folder / usage_name, folder / "memory.stat"
    if not (limit_file.exists() and usage_file.exists() and stat_file.exists()):
        return []
    text = limit_file.read_text().strip()
    if text == "max" or int(text) >= 1 << 62:  # version 1 writes "no limit" as a huge number
        return []
    statistics = dict(line.split() for line in stat_file.read_text().splitlines())
    return [(int(text), int(usage_file.read_text()) - int(statistics.get(cache_name, 0)))]
