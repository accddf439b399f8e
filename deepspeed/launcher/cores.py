"""Which processor cores each rank gets under ``--bind_cores_to_rank``.

The system's affinity call binds a rank and everything it starts; memory that a bound rank touches first lies near its
cores, so no other program is needed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from deepspeed.launcher.resources import LauncherError


def parse_core_list(text: str) -> list[int]:
    """Reads ``--bind_core_list`` such as ``1,3-5``.

    Raises:
        LauncherError: It is no list of cores and ranges, or names a core twice.
    """
    cores: list[int] = []
    for item in text.split(","):
        first, dash, last = (part.strip() for part in item.partition("-"))
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(last) >= int(first))):
            raise LauncherError(f"--bind_core_list {text}: expected cores and ranges like 1,3-5 but found {item!r}")
        cores += range(int(first), int(last or first) + 1)
    if len(set(cores)) < len(cores):
        raise LauncherError(f"--bind_core_list {text}: a core comes twice; name each once")
    return cores


def share_cores(core_list: str | None, local_size: int) -> list[tuple[int, ...]]:
    """Divides the cores of this machine among its ranks, neighbours together.

    Args:
        core_list: ``--bind_core_list``; None for one hardware thread of each core that this process may use.
        local_size: Ranks on this machine.

    Returns:
        The cores of each local rank: equally many; what does not divide evenly stays free.

    Raises:
        LauncherError: There are fewer cores than ranks, or one that this process may not use.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise LauncherError("--bind_cores_to_rank: this system does not bind processes to cores; leave the option out")
    usable = os.sched_getaffinity(0)
    cores = parse_core_list(core_list) if core_list else first_threads(sorted(usable))
    if foreign := [core for core in cores if core not in usable]:
        raise LauncherError(f"--bind_core_list {core_list}: cores {foreign} are not among the usable {sorted(usable)}")
    each = len(cores) // local_size
    if each == 0:
        raise LauncherError(
            f"--bind_cores_to_rank: {local_size} ranks share {len(cores)} core(s) ({cores}); start fewer ranks, name "
            "more cores with --bind_core_list, or leave the options out"
        )
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(local_size)]


def first_threads(cores: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """One of the hardware threads of each core: its siblings share the arithmetic units, and gain nothing."""
    kept: list[int] = []
    seen: set[str] = set()
    for core in cores:
        siblings = root / f"cpu{core}" / "topology" / "thread_siblings_list"
        key = siblings.read_text().strip() if siblings.is_file() else f"{core}"
        if key not in seen:
            seen.add(key)
            kept.append(core)
    return kept
