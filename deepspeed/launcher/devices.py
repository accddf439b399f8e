"""Finds the devices of this machine, and assigns CPU cores to ranks under ``--bind_cores_to_rank``.

Devices are found without importing torch where possible: that import takes seconds. The system's affinity call binds a
rank and everything it starts to its cores; memory that a bound rank touches first lies near them, so no other program
is needed.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed.launcher.resources import LauncherError

# Device files of accelerators that torch can use: NVIDIA (also WSL2 and Tegra), AMD and Intel, Ascend, Gaudi,
# Cambricon, and those in the kernel's accelerator class.
_DEVICE_FILES = (
    "/dev/nvidia[0-9]*",
    "/dev/nvidiactl",
    "/dev/dxg",
    "/dev/nvhost-*",
    "/dev/nvmap",
    "/dev/kfd",
    "/dev/dri/renderD*",
    "/dev/davinci*",
    "/dev/hl[0-9]*",
    "/dev/accel*",
    "/dev/cambricon*",
    "/dev/tcaicard*",
    "/dev/biren*",
    "/dev/xpu*",
)


@dataclass(frozen=True)
class LocalDevices:
    """The devices of one kind on this machine."""

    kind: str  # the accelerator's name; ``"cpu"`` if there is none
    # one per device, as the visible-device variable spells it; empty on the CPU, which takes any number of ranks
    ids: tuple[int | str, ...] = ()
    visible_variables: tuple[str, ...] = ()  # the variables that select the devices a process sees

    @property
    def is_cpu(self) -> bool:
        """Returns whether ranks run on the CPU."""
        return self.kind == "cpu"


def find_devices(environment: MutableMapping[str, str], ignore_visible: bool = False) -> LocalDevices:
    """Finds the accelerator that ranks with this environment will use, and its devices.

    Args:
        environment: ``os.environ``: torch reads the visible-device variable there.
        ignore_visible: Find all devices; the visible-device variable is removed from ``environment``.

    Raises:
        DeepSpeedConfigError: ``DS_ACCELERATOR`` names an accelerator that this machine lacks.
    """
    choice = environment.get("DS_ACCELERATOR", "").strip().lower()
    if choice == "cpu" or (not choice and "torch" not in sys.modules and not _has_device_files()):
        return LocalDevices("cpu")
    from deepspeed.accelerator import get_accelerator  # imports torch, so only if there may be a device

    accelerator = get_accelerator()
    kind = accelerator.device_name()
    if kind == "cpu":
        return LocalDevices("cpu")
    variables = tuple(accelerator.visible_devices_envs())
    if ignore_visible:
        for name in variables:
            environment.pop(name, None)
    return LocalDevices(kind, visible_ids(environment, variables, accelerator.device_count()), variables)


def visible_ids(environment: Mapping[str, str], variables: tuple[str, ...], count: int) -> tuple[int | str, ...]:
    """Returns the ids of the ``count`` devices that torch sees: those of the visible-device variable, if it is set."""
    for name in variables:
        if listed := environment.get(name, "").strip():
            ids = [item.strip() for item in listed.split(",")]
            return tuple(int(item) if item.isdecimal() else item for item in ids[:count])
    return tuple(range(count))


def _has_device_files() -> bool:
    if not sys.platform.startswith("linux"):
        return True  # elsewhere only torch can count them
    return any(glob.glob(pattern) for pattern in _DEVICE_FILES)


def usable_cores() -> int:
    """Returns the number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parse_core_list(text: str) -> list[int]:
    """Reads cores such as ``1,3-5``. Raises LauncherError: the text is no list of ranges, or names a core twice."""
    cores: list[int] = []
    for item in text.split(","):
        first, dash, last = (part.strip() for part in item.partition("-"))
        if not first.isdecimal() or (dash and not (last.isdecimal() and int(last) >= int(first))):
            raise LauncherError(
                f"--bind_core_list {text}: expected cores and ranges like 1,3-5, found {item!r}; correct it"
            )
        cores += range(int(first), int(last or first) + 1)
    if len(set(cores)) < len(cores):
        raise LauncherError(f"--bind_core_list {text}: expected each core once, found one twice; name each once")
    return cores


def share_cores(core_list: str | None, local_size: int) -> list[tuple[int, ...]]:
    """Divides the cores of this machine among its ranks, neighbors together.

    Args:
        core_list: ``--bind_core_list``; None for one hardware thread of each core that this process may use.

    Returns:
        The cores of each local rank, equally many; the remainder is not used.

    Raises:
        LauncherError: There are fewer cores than ranks, or one that this process may not use.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise LauncherError("--bind_cores_to_rank: this system does not bind processes to cores; leave the option out")
    usable = os.sched_getaffinity(0)
    cores = parse_core_list(core_list) if core_list else first_threads(sorted(usable))
    if foreign := [core for core in cores if core not in usable]:
        raise LauncherError(
            f"--bind_core_list {core_list}: cores {foreign} are not among the usable {sorted(usable)}; "
            "choose from these"
        )
    each = len(cores) // local_size
    if each == 0:
        raise LauncherError(
            f"--bind_cores_to_rank: {local_size} ranks share {len(cores)} core(s) ({cores}); start fewer ranks, name "
            "more cores with --bind_core_list, or leave the options out"
        )
    return [tuple(cores[rank * each : (rank + 1) * each]) for rank in range(local_size)]


def first_threads(cores: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Returns one hardware thread of each core; further threads of a core share its arithmetic units."""
    first: list[int] = []
    seen: set[str] = set()
    for core in cores:
        siblings = root / f"cpu{core}" / "topology" / "thread_siblings_list"
        key = siblings.read_text().strip() if siblings.is_file() else f"{core}"
        if key not in seen:
            seen.add(key)
            first.append(core)
    return first
