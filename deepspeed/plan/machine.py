"""The machines that a job is planned for, and the figures of a device as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from deepspeed.accelerator.devices import Device, DeviceEfficiency, find_device, read_bytes
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.limits import check_count

_HOST_BANDWIDTH = 300e9  # bytes per second of a node's memory, for updates on the host: a guess
_MAY_BE_ZERO = frozenset({"half_size", "contention", "launch", "start", "shared_link", "shared_start"})
"""Fields of ``DeviceEfficiency`` that may be 0."""
NETWORKS: dict[str, float] = {
    "edr": 100,
    "hdr": 200,
    "ndr": 400,
    "xdr": 800,
    "efa": 100,
    "efa-v2": 200,
    "efa-v3": 400,
    "roce-100": 100,
    "roce-200": 200,
    "roce-400": 400,
    "ethernet-10": 10,
    "ethernet-25": 25,
    "ethernet-100": 100,
}
"""Gb/s and direction of one adapter. InfiniBand and EFA are named by generation, RoCE and Ethernet by rate."""


@dataclass(frozen=True)
class Machine:
    """The machines that a job is planned for."""

    device: Device  # the accelerator
    nodes: int  # number of nodes
    devices_per_node: int  # accelerators per node
    device_memory: int  # bytes that one accelerator offers
    host_memory: int | None = None  # bytes of one node's host memory; None: not compared
    network: float = 50e9  # bytes per second and direction between nodes, per accelerator
    disk: float = 5e9  # bytes per second and direction of one node's disk
    # share of the device's memory that is left to the driver, the communication library and fragmentation
    headroom: float = 0.05
    multiplies_in_fp8: bool = False  # a simulated step is timed as if its linear layers multiplied in fp8, the head too

    def __post_init__(self) -> None:
        check_count("ranks", self.ranks, f"{self.nodes:,} nodes of {self.devices_per_node:,} devices")

    @property
    def ranks(self) -> int:
        """Accelerators of all nodes."""
        return self.nodes * self.devices_per_node

    @property
    def peak_flops(self) -> float:
        """Operations per second of an accelerator, at most: in bf16, or in fp8 where products are in fp8."""
        reached = self.device.efficiency
        peak = max(self.device.flops, self.device.fp8_flops if self.multiplies_in_fp8 else 0.0)
        return peak * max(
            1.0, reached.matmul / reached.factor
        )  # more than 1 on a measured device, whose peak is unknown

    @property
    def link(self) -> float:
        """Bytes per second and direction between accelerators of a node, at most; 0: not known."""
        return max(self.device.link, self.device.efficiency.shared_link)

    @property
    def link_domain(self) -> int:
        """Accelerators that ``device.link`` joins: those of a node, or of several nodes where the device spans them."""
        return max(self.devices_per_node, min(self.device.domain, self.ranks))

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second of host memory for each accelerator, while those of its node update at the same time."""
        return _HOST_BANDWIDTH / self.devices_per_node

    @property
    def processors(self) -> float | None:
        """Ranks of a node that can compute at once without slowing each other; None: all of them."""
        cores = self.device.cores
        return cores if 0 < cores < self.devices_per_node else None

    @property
    def usable(self) -> int:
        """Bytes of one accelerator that model and training may use."""
        return int(self.device_memory * (1 - self.headroom))


def unknown_rates(machine: Machine) -> list[str]:
    """Returns descriptions of the unknown rates that a predicted time needs."""
    device = machine.device
    found = [("operations per second", device.flops), ("bytes per second of its memory", device.memory_bandwidth)]
    if machine.devices_per_node > 1:
        found.append(("bytes per second of the links inside a node", device.link))
    return [name for name, rate in found if rate <= 0]


def read_machine_file(path: str | Path) -> Device:
    """Returns the device that a file describes.

    The file has the fields of ``Device``; ``efficiency`` is an object with those of ``DeviceEfficiency``. ``like`` is
    the name of a device of the table, which supplies missing fields. Without ``like``, ``memory`` (bytes, or
    text such as ``80GB``), ``flops`` and ``memory_bandwidth`` are needed.

    Raises:
        DeepSpeedConfigError: The file cannot be read, or a field is unknown, missing or of the wrong type.
    """
    try:
        facts = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError(f"found a {type(facts).__name__}")
    except (OSError, ValueError) as error:
        raise DeepSpeedConfigError(
            f"machine {path}: expected a JSON object with figures of a device; {error}"
        ) from error
    like, reached = facts.pop("like", None), facts.pop("efficiency", {})
    if not isinstance(reached, dict):
        raise DeepSpeedConfigError(f"machine {path}: efficiency: expected an object, found {type(reached).__name__}")
    _refuse_unknown(path, facts, {f.name for f in fields(Device)} - {"efficiency"}, "of a device")
    _refuse_unknown(path, reached, {f.name for f in fields(DeviceEfficiency)}, "of efficiency")
    if "memory" in facts:
        facts["memory"] = read_bytes(facts["memory"], f"machine {path}: memory")
    _check_facts(path, facts)
    _check_numbers(path, reached, {name for name in reached if name not in _MAY_BE_ZERO})
    if like is None:
        missing = [name for name in ("memory", "flops", "memory_bandwidth") if name not in facts]
        if missing:
            raise DeepSpeedConfigError(
                f"machine {path}: {', '.join(missing)} missing; give them, or like, the name of a device in the table"
            )
        base = Device(
            name=Path(path).stem, memory=0, flops=0.0, memory_bandwidth=0.0, link=0.0, host_link=0.0, source=str(path)
        )
    else:
        base = find_device(like)
    made: dict[str, Any] = {"source": str(path), **facts}
    return replace(base, **made, efficiency=replace(base.efficiency, **reached))


def _check_facts(path: str | Path, facts: dict[str, Any]) -> None:
    for name in ("name", "source"):
        if not isinstance(facts.get(name, ""), str):
            raise DeepSpeedConfigError(f"machine {path}: {name}: expected text, found {facts[name]!r}")
    _check_numbers(path, {name: value for name, value in facts.items() if name not in ("name", "source")}, set())
    for name in ("cores", "domain"):
        if not isinstance(facts.get(name, 0), int):
            raise DeepSpeedConfigError(f"machine {path}: {name}: expected a whole number, found {facts[name]!r}")


def _check_numbers(path: str | Path, numbers: dict[str, Any], positive: set[str]) -> None:
    """Raises unless all are numbers of 0 or more, and those named in ``positive`` above 0. JSON may also have NaN."""
    for name, value in numbers.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not value >= 0 or (name in positive and value == 0):
            least = "above 0" if name in positive else "of 0 or more"
            raise DeepSpeedConfigError(f"machine {path}: {name}: expected a number {least}, found {value!r}")


def write_machine_file(device: Device, path: str | Path) -> None:
    """Writes the figures of a device to a file that :func:`read_machine_file` reads."""
    Path(path).write_text(json.dumps(asdict(device), indent=2) + "\n", encoding="utf-8")


def _refuse_unknown(path: str | Path, facts: dict[str, Any], known: set[str], what: str) -> None:
    unknown = sorted(set(facts) - known)
    if unknown:
        raise DeepSpeedConfigError(
            f"machine {path}: {', '.join(unknown)}: no field {what}; expected some of {', '.join(sorted(known))}"
        )


def read_network(value: float | str, devices_per_node: int) -> float:
    """Returns bytes per second and direction between nodes, per device; the devices of a node share its adapters.

    Args:
        value: That number; or ``8xndr`` (number of a node's adapters and their name in :data:`NETWORKS`), ``4x200``
            (number of adapters, Gb/s of each), or ``ndr`` (one adapter for each device).

    Raises:
        DeepSpeedConfigError: ``value`` is none of these.
    """
    try:
        return float(value)
    except ValueError:
        text = str(value).strip().lower()
    match = re.fullmatch(r"(?:(\d+)x)?([a-z0-9.-]+)", text)
    rate = NETWORKS.get(match.group(2)) if match else None
    if match and rate is None and match.group(1) and re.fullmatch(r"\d+(\.\d+)?", match.group(2)):
        rate = float(match.group(2))
    if match is None or not rate:
        raise DeepSpeedConfigError(
            f"network {value!r}: expected bytes per second and device, or adapters of a node such as 8xndr or 4x200 "
            f"(Gb/s each), or one of {', '.join(NETWORKS)}"
        )
    each = int(match.group(1) or devices_per_node)
    return each * rate * 1e9 / 8 / devices_per_node
