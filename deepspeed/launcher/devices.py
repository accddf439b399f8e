"""Which devices this machine has, found without importing torch where possible: that import takes seconds."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

# Device files of accelerators that torch can use: NVIDIA (also WSL2 and Tegra), AMD and Intel, Ascend, Gaudi,
# Cambricon and whatever uses the kernel's accelerator class.
_SIGNS = (
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
    """The devices of one kind on this machine.

    Attributes:
        kind: The accelerator's name; ``"cpu"`` if there is none.
        ids: One per device, as the visible-device variable spells it; empty on the CPU, that takes any number of them.
        visible_variables: The variables that say which devices a process sees.
    """

    kind: str
    ids: tuple[int | str, ...] = ()
    visible_variables: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Whether ranks run on the CPU."""
        return self.kind == "cpu"


def find_devices(environment: MutableMapping[str, str], ignore_visible: bool = False) -> LocalDevices:
    """Finds the accelerator that ranks with this environment will use, and its devices.

    Args:
        environment: ``os.environ``: torch reads the visible-device variable there.
        ignore_visible: Find all devices; the visible-device variable is removed from ``environment``.

    Raises:
        DeepSpeedConfigError: ``DS_ACCELERATOR`` names an accelerator that is not here.
    """
    choice = environment.get("DS_ACCELERATOR", "").strip().lower()
    if choice == "cpu" or (not choice and "torch" not in sys.modules and not _has_signs()):
        return LocalDevices("cpu")
    from deepspeed.accelerator import get_accelerator  # imports torch, so only when a device may be there

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
    """The ids of the ``count`` devices that torch sees: those of the visible-device variable, if it is set."""
    for name in variables:
        if listed := environment.get(name, "").strip():
            ids = [item.strip() for item in listed.split(",")]
            return tuple(int(item) if item.isdecimal() else item for item in ids[:count])
    return tuple(range(count))


def _has_signs() -> bool:
    if not sys.platform.startswith("linux"):
        return True  # elsewhere only torch knows
    return any(glob.glob(pattern) for pattern in _SIGNS)


def usable_cores() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
