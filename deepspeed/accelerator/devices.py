"""The table of devices with their vendors' figures, and the parsing of quantities with units.

Peak arithmetic is dense bf16 (no sparsity). Bandwidths are per direction, in bytes per second. A device's memory is
what its driver reports (``nvidia-smi``, ``rocminfo``), more than its name suggests: an H100 with 80 GB has 81,559 MiB.
In input, ``GB``, ``MB`` and so on are powers of ten, ``GiB``, ``MiB`` and so on powers of two.
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


CONTENTION_OF_PROCESSORS = 1.0
"""Value of ``contention`` for ranks on CPUs: collectives run on the cores that compute the model."""


@dataclass(frozen=True)
class DeviceEfficiency:
    """The constants of predicted times: shares of a device's figures that programs reach, and fixed costs.

    They are fitted to published runs (``benchmarks/scale_fit.py``), one set for each kind of device.
    """

    matmul: float = 0.7  # share of ``flops`` that products of large matrices reach
    fp8: float = 0.57  # share of ``fp8_flops`` that products of large matrices reach
    attention: float = 0.4  # share of ``flops`` that a fused attention kernel reaches
    bandwidth: float = 0.8  # share of ``memory_bandwidth`` that elementwise operations reach
    half_size: float = 84.0  # length of a side of a matrix at which a product runs at half of its rate
    link: float = 0.79  # share of ``link`` that collectives reach
    network: float = 0.65  # share of the network's rate that collectives reach
    # seconds added to computation per second of a concurrent collective, as both use the device's cores and memory
    contention: float = 0.18
    launch: float = 6e-6  # seconds that the host takes to start one operation
    start: float = 12e-6  # seconds to start a collective: its kernel and the first synchronization of the ranks
    # bytes per second that a rank reads from shared memory, in sums and exchanges of activations between CPU ranks of
    # one host; 0: these take as long as other collectives
    shared_link: float = 0.0
    shared_start: float = 0.0  # seconds to start such a sum or exchange
    factor: float = 1.0  # ratio of measured to predicted time of operations on this machine; 1 if not measured


@dataclass(frozen=True)
class Device:
    """One kind of accelerator."""

    name: str  # the name of ``--device`` and of :func:`find_device`
    memory: int  # bytes, as the driver reports them
    flops: float  # bf16 operations per second, dense
    memory_bandwidth: float  # bytes per second of its own memory
    link: float  # bytes per second and direction to the other devices of the node
    host_link: float  # bytes per second and direction to the host
    source: str  # where the figures come from
    fp8_flops: float = 0.0  # fp8 operations per second, dense; 0: the device has no fp8
    domain: int = 0  # number of devices that ``link`` joins, where that is more than one node; 0: one node
    # shares of these figures that programs reach, for predicted times
    efficiency: DeviceEfficiency = DeviceEfficiency()
    # Processor cores of a node, on which all of its ranks compute, one thread each; 0: each rank has a device of its
    # own. The other figures are those of a rank while all of the node compute.
    cores: int = 0


_SMI = "memory: nvidia-smi, as listed by github.com/modal-labs/modal-client/pull/2797"
_A100 = "NVIDIA A100 data sheet r4, as listed by glennklockwood.com/garden/processors/A100; " + _SMI
_HOPPER_PAPER = "NVIDIA H100 architecture paper, as listed by glennklockwood.com/garden/processors/h100"
_H100, _H200 = f"{_HOPPER_PAPER}; {_SMI}", _HOPPER_PAPER + "; memory: nvidia-smi"
_BOOK = "makers' data sheets, as listed by llmbook.apartsin.com/appendices/appendix-g-hardware-compute"
_L4, _L40S = f"NVIDIA L4 data sheet; {_SMI}", f"{_BOOK}; {_SMI}"
_B200 = _BOOK + "; memory: nvidia-smi, in github.com/NVIDIA/TensorRT-LLM/issues/10278"
_MI300X = _BOOK + "; memory: rocminfo, in github.com/ROCm/legacy-rocm-build/issues/4414"
_MIB = 2**20

_V100 = "NVIDIA V100 data sheet; memory: nvidia-smi"
_GB200 = "NVIDIA GB200 NVL72 data sheet, per GPU; 72 GPUs share one NVLink domain"
_TETON = "torchtitan benchmarks: H100 with 96 GB of HBM2e and a limit of 500 W (Grand Teton)"

# Fitted to half of the published runs (benchmarks/scale_fit.py), rounded; none is at a limit of the fit. Blackwell has
# only three runs, so its shares are those of Hopper, except for fp8. A device without runs has the defaults.
_AMPERE = DeviceEfficiency(matmul=0.71, attention=0.58, bandwidth=0.79)
_HOPPER = DeviceEfficiency(matmul=0.65, fp8=0.54, attention=0.35, bandwidth=0.85)
_HOPPER_500W = DeviceEfficiency(matmul=0.48, fp8=0.50, attention=0.36, bandwidth=0.72)
_BLACKWELL = DeviceEfficiency(matmul=0.65, fp8=0.60, attention=0.35, bandwidth=0.85)

DEVICES = {
    device.name: device
    for device in (
        # name, memory, flops, memory_bandwidth, link, host_link, source, fp8_flops, domain
        Device("v100", 32_768 * _MIB, 125e12, 0.9e12, 150e9, 16e9, _V100),
        Device("v100-16", 16_384 * _MIB, 125e12, 0.9e12, 150e9, 16e9, _V100),
        Device("a100-40", 40_960 * _MIB, 312e12, 1.555e12, 300e9, 32e9, _A100, efficiency=_AMPERE),
        Device("a100", 81_920 * _MIB, 312e12, 2.039e12, 300e9, 32e9, _A100, efficiency=_AMPERE),
        Device("h100", 81_559 * _MIB, 989.4e12, 3.35e12, 450e9, 64e9, _H100, 1978.9e12, efficiency=_HOPPER),
        Device("h100-500w", 95_830 * _MIB, 989.4e12, 2.4e12, 450e9, 64e9, _TETON, 1978.9e12, efficiency=_HOPPER_500W),
        Device("h200", 143_771 * _MIB, 989.4e12, 4.8e12, 450e9, 64e9, _H200, 1978.9e12, efficiency=_HOPPER),
        Device("b200", 183_359 * _MIB, 2250e12, 8e12, 900e9, 64e9, _B200, 4500e12, efficiency=_BLACKWELL),
        Device("gb200", 189_471 * _MIB, 2450e12, 8e12, 900e9, 300e9, _GB200, 4900e12, 72, efficiency=_BLACKWELL),
        Device("l4", 23_034 * _MIB, 121e12, 300e9, 32e9, 32e9, _L4, 242e12),
        Device("l40s", 46_068 * _MIB, 362e12, 864e9, 32e9, 32e9, _L40S, 733e12),
        Device("mi300x", 196_592 * _MIB, 1307e12, 5.3e12, 448e9, 64e9, _MI300X, 2614.9e12),
    )
}
"""Devices by name. Disk and network belong to the node, so they are in :class:`deepspeed.plan.machine.Machine`."""

_PRODUCTS = ("GB200", "B200", "H200", "H100", "A100", "V100", "L40S", "L4", "MI300X")
_SMALL_A100, _SMALL_V100 = 60e9, 24e9  # bytes: devices below are the variant with less memory


def device_of_product(product: str, memory: float | None = None) -> Device | None:
    """Returns the device with a vendor's name (``NVIDIA A100-SXM4-80GB``, else of ``memory`` bytes), or None."""
    words = re.split(r"[^A-Z0-9]+", product.upper())
    found = next((name for name in _PRODUCTS if name in words), None)
    if found is None:
        return None
    sizes = [int(word[:-2]) * 1e9 for word in words if re.fullmatch(r"\d+GB", word)]
    size = sizes[0] if sizes else memory
    if found == "A100" and size is not None and size < _SMALL_A100:
        return DEVICES["a100-40"]
    if found == "V100" and size is not None and size < _SMALL_V100:
        return DEVICES["v100-16"]
    return DEVICES["h100-500w"] if found == "H100" and "500W" in words else DEVICES[found.lower()]


def find_device(name: str) -> Device:
    """Returns the device of that name. Raises DeepSpeedConfigError: the table has no device of that name."""
    found = DEVICES.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise DeepSpeedConfigError(
            f"device {name!r} is not in the table; choose one of {', '.join(DEVICES)}, or give its memory "
            "(such as 24GB) and, for predicted times, its rates"
        )
    return found


def read_bytes(value: int | str, what: str) -> int:
    """Returns a number of bytes, from an int or from text with a unit (``80GB``, ``40 GiB``).

    Raises:
        DeepSpeedConfigError: Text has no unit, or the quantity is not positive.
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
            f"{what}: {value!r} has no unit; write {match.group(1)}GB (powers of ten) or {match.group(1)}GiB "
            "(powers of two)"
        )
    nbytes = int(float(match.group(1)) * _UNITS[unit])
    if nbytes <= 0:
        raise DeepSpeedConfigError(f"{what}: expected a quantity above 0, found {value!r}")
    return nbytes


def in_words(nbytes: float) -> str:
    """Returns bytes as text, in the largest unit (GiB, MiB, KiB) that gives 0.1 or more; otherwise in B."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= 0.1 * size:
            return f"{nbytes / size:,.2f} {unit}"
    return f"{nbytes:,.0f} B"
