"""What devices can do, by their makers' figures, and quantities with units as people write them.

Peak arithmetic is dense bf16 (no sparsity). Bandwidths are per direction, in bytes per second. A device's memory is
what its driver reports (``nvidia-smi``, ``rocminfo``), more than its name says: an H100 with 80 GB has 81,559 MiB.
In what people write, ``GB`` and its kin are powers of ten, ``GiB`` and its kin powers of two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from deepspeed.errors import DeepSpeedConfigError

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


@dataclass(frozen=True)
class Device:
    """One kind of accelerator.

    Attributes:
        name: As it is asked for.
        memory: Bytes, as the driver reports them.
        flops: bf16 operations per second, dense.
        memory_bandwidth: Of its own memory.
        link: To the other devices of the node, per direction.
        host_link: To the host, per direction.
        source: Where the figures come from.
    """

    name: str
    memory: int
    flops: float
    memory_bandwidth: float
    link: float
    host_link: float
    source: str


_SMI = "memory: nvidia-smi, as listed by github.com/modal-labs/modal-client/pull/2797"
_A100 = "NVIDIA A100 data sheet r4, as listed by glennklockwood.com/garden/processors/A100; " + _SMI
_HOPPER = "NVIDIA H100 architecture paper, as listed by glennklockwood.com/garden/processors/h100"
_BOOK = "makers' data sheets, as listed by llmbook.apartsin.com/appendices/appendix-g-hardware-compute"
_B200 = _BOOK + "; memory: nvidia-smi, in github.com/NVIDIA/TensorRT-LLM/issues/10278"
_MI300X = _BOOK + "; memory: rocminfo, in github.com/ROCm/legacy-rocm-build/issues/4414"
_MIB = 2**20

DEVICES = {
    device.name: device
    for device in (
        Device("a100-40", 40_960 * _MIB, 312e12, 1.555e12, 300e9, 32e9, _A100),
        Device("a100", 81_920 * _MIB, 312e12, 2.039e12, 300e9, 32e9, _A100),
        Device("h100", 81_559 * _MIB, 989.4e12, 3.35e12, 450e9, 64e9, f"{_HOPPER}; {_SMI}"),
        Device("h200", 143_771 * _MIB, 989.4e12, 4.8e12, 450e9, 64e9, _HOPPER + "; memory: nvidia-smi"),
        Device("b200", 183_359 * _MIB, 2250e12, 8e12, 900e9, 64e9, _B200),
        Device("l40s", 46_068 * _MIB, 362e12, 864e9, 32e9, 32e9, f"{_BOOK}; {_SMI}"),
        Device("mi300x", 196_592 * _MIB, 1307e12, 5.3e12, 448e9, 64e9, _MI300X),
    )
}
"""By name. A node's own disk and network are no property of the device; see :class:`Machine`."""


@dataclass(frozen=True)
class Machine:
    """The machines that a job is planned for.

    Attributes:
        device: The accelerator.
        nodes: Number of nodes.
        devices_per_node: Accelerators of each.
        device_memory: Bytes that one accelerator offers.
        host_memory: Bytes of one node's host memory; None: not compared.
        network: Bytes per second and direction between nodes, per accelerator.
        disk: Bytes per second and direction of one node's disk.
        headroom: Share of the device's memory that is left to the driver, the communication library and fragmentation.
    """

    device: Device
    nodes: int
    devices_per_node: int
    device_memory: int
    host_memory: int | None = None
    network: float = 50e9
    disk: float = 5e9
    headroom: float = 0.05

    @property
    def ranks(self) -> int:
        """Accelerators of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def usable(self) -> int:
        """Bytes of one accelerator that model and training may use."""
        return int(self.device_memory * (1 - self.headroom))


def find_device(name: str) -> Device:
    """The device of that name.

    Raises:
        DeepSpeedConfigError: There is none.
    """
    found = DEVICES.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise DeepSpeedConfigError(
            f"device {name!r} is not in the table; choose one of {', '.join(DEVICES)}, or give the memory "
            "(such as 24GB) and, for times, the rates of your own"
        )
    return found


def read_bytes(value: int | str, what: str) -> int:
    """A number of bytes: an int, or text with a unit (``80GB``, ``40 GiB``).

    Args:
        value: The quantity.
        what: Whose, for the message.

    Raises:
        DeepSpeedConfigError: It has no unit, or is no positive quantity.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value <= 0:
            raise DeepSpeedConfigError(f"{what}: expected bytes above 0, found {value}")
        return value
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", str(value))
    unit = match.group(2).upper() if match else ""
    if match is None or (unit and unit not in _UNITS):
        raise DeepSpeedConfigError(f"{what}: expected a quantity such as 80GB or 64GiB, found {value!r}")
    if not unit:
        raise DeepSpeedConfigError(
            f"{what}: {value!r} has no unit; write {match.group(1)}GB (powers of ten) or {match.group(1)}GiB (of two)"
        )
    nbytes = int(float(match.group(1)) * _UNITS[unit])
    if nbytes <= 0:
        raise DeepSpeedConfigError(f"{what}: expected a quantity above 0, found {value!r}")
    return nbytes


def in_words(nbytes: float) -> str:
    """Bytes as people read them: GiB from a tenth of one on, else MiB or KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= 0.1 * size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:,.0f} B"
