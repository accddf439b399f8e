"""Reads the rate of the network between nodes: a number, or adapters by name."""

from __future__ import annotations

import re

from deepspeed.errors import DeepSpeedConfigError

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


def read_network(value: float | str, devices_per_node: int) -> float:
    """Returns bytes per second and direction between nodes, per device.

    Args:
        value: That number; or ``8xndr`` (number of a node's adapters and their name in :data:`NETWORKS`), ``4x200``
            (number of adapters, Gb/s of each), or ``ndr`` (one adapter for each device).
        devices_per_node: Devices of a node, which share its adapters.

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
