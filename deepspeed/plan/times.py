"""What a step moves inside and between nodes at least, and how long it takes at least.

A collective over nodes of g devices each cannot do with less than this: what a node does not hold must come in through
its network, once, divided among its devices; what a device does not hold must come over its link from its neighbours,
where that is shorter. So a gather of B bytes costs each device B (nodes - 1) / nodes / g from the network and
B (g - 1) / g from the node; a reduce-scatter the same the other way; an all-reduce counts as both. An exchange
between all (all_to_all) may have all its partners on the same node: what a device sends to others passes its link, or
its network where it is alone on its node.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed.plan.devices import Machine
from deepspeed.plan.flow import Flow


@dataclass(frozen=True)
class Travel:
    """One collective of a step, per device.

    Attributes:
        name: Of the collective.
        calls: How often.
        nbytes: Of the full buffers, an all-reduce counted twice.
        inside: Bytes that each device receives (or sends) inside the node, at least.
        between: Bytes that each device receives (or sends) over the network, at least.
    """

    name: str
    calls: int
    nbytes: int
    inside: int
    between: int


def travels(flow: Flow, machine: Machine) -> list[Travel]:
    """The collectives of a step."""
    nodes, devices = machine.nodes, machine.devices_per_node
    found = []
    for name, (calls, nbytes) in sorted(flow.asked.items()):
        if name == "all_to_all":
            sent = flow.ran[name][1]
            inside, between = (sent, 0) if devices > 1 else (0, sent)
        else:
            inside, between = nbytes * (devices - 1) // devices, nbytes * (nodes - 1) // nodes // devices
        found.append(Travel(name, calls, nbytes, inside, between))
    return found


def lower_bounds(flow: Flow, machine: Machine) -> dict[str, float]:
    """Seconds that each resource is busy in a step, at least; empty where the device's rates are not known.

    They may all work at once, so the step takes no less than the longest.
    """
    device = machine.device
    moved = travels(flow, machine)
    disk = (flow.read + flow.written) * machine.devices_per_node
    amounts = {
        "arithmetic": (flow.flops, device.flops),
        "links inside the node": (sum(t.inside for t in moved), device.link),
        "network between nodes": (sum(t.between for t in moved), machine.network),
        "link to the host": (max(flow.down, flow.up), device.host_link),
        "disk of the node": (disk, machine.disk),
    }
    return {name: amount / rate for name, (amount, rate) in amounts.items() if rate > 0 and amount > 0}
