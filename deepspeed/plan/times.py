"""Lower bounds of a step's traffic inside and between nodes, and of its time, at the vendors' peak rates.

Each collective lies along an axis of the mesh, on some nodes (or joined nodes, ``Machine.link_domain``) with g devices
each. What a node lacks must come in through its network once, divided among its devices, and what a device lacks over
its link: a gather of B bytes costs a device at least B (nodes - 1) / nodes / g from the network and B (g - 1) / g from
its node. A reduce-scatter costs the same the other way, and an all-reduce both. What a device sends in an all_to_all
passes its link, or its network if it is alone on its node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from deepspeed.axes import DATA, EXPERT, PIPE, SEQUENCE, TENSOR
from deepspeed.comm.job.mesh import Mesh
from deepspeed.errors import DeepSpeedError
from deepspeed.plan.machine import Machine
from deepspeed.plan.step_totals import StepTotals


@dataclass(frozen=True)
class PlannedTransfer:
    """One collective of a step, per device."""

    name: str  # the name of the collective
    axis: str  # the axis of its ranks
    calls: int  # number of calls
    nbytes: int  # bytes of the full buffers, an all-reduce counted twice
    inside: int  # bytes that each device receives (or sends) inside the node, at least
    between: int  # bytes that each device receives (or sends) over the network, at least

    @property
    def title(self) -> str:
        """Name and, where it is not that of all data-parallel ranks, axis."""
        return self.name if self.axis == DATA else f"{self.name} ({self.axis})"


def count_spanned(members: Sequence[int], machine: Machine) -> tuple[int, int]:
    """Returns the link domains (nodes, on most machines) on which ranks lie, and the most of them on one."""
    in_domain = numpy.unique(numpy.asarray(members) // machine.link_domain, return_counts=True)[1]
    return len(in_domain), int(in_domain.max())


def count_near(members: Sequence[int], rank: int, machine: Machine) -> int:
    """Returns how many of ``members`` lie in the link domain of ``rank``, itself included where it is one."""
    domain = machine.link_domain
    return int(numpy.count_nonzero(numpy.asarray(members) // domain == rank // domain))


def busiest_seconds(inside: float, between: float, machine: Machine) -> float:
    """Returns the least seconds of a transfer; links and network work at once, unknown rates are ignored."""
    link, network = machine.link, machine.network
    return max(inside / link if link > 0 else 0.0, between / network if network > 0 else 0.0)


def planned_transfers(
    flow: StepTotals, machine: Machine, mesh: Mesh, rank: int, members: Mapping[str, Sequence[int]] | None = None
) -> list[PlannedTransfer]:
    """Returns the collectives of a step; ``members`` has the ranks along an axis (missing: all of the mesh)."""
    found = []
    for (name, axis), (calls, nbytes) in sorted(flow.requested_along.items()):
        if name == "send":
            found.append(PlannedTransfer(name, axis, calls, nbytes, *_to_neighbors(nbytes, machine, mesh, rank)))
            continue
        ranks = (members or {}).get(axis) or range(mesh.world_size)
        nodes, devices = count_spanned(ranks, machine)
        if name == "swap" or (name in ("all_to_all", "move") and axis in (EXPERT, SEQUENCE)):
            found.append(PlannedTransfer(name, axis, calls, nbytes, *_to_all(nbytes, machine, ranks, rank)))
            continue
        if name == "all_to_all":
            inside, between = (nbytes, 0) if devices > 1 else (0, nbytes)
        else:
            inside, between = nbytes * (devices - 1) // devices, nbytes * (nodes - 1) // nodes // devices
        found.append(PlannedTransfer(name, axis, calls, nbytes, inside, between))
    return found


def _to_all(nbytes: int, machine: Machine, ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """Returns the bytes inside the node and to other nodes, of a rank that sends equally much to each of the others."""
    near = count_near(ranks, rank, machine) - 1
    inside = nbytes * near // max(len(ranks) - 1, 1)
    return inside, nbytes - inside


def _to_neighbors(nbytes: int, machine: Machine, mesh: Mesh, rank: int) -> tuple[int, int]:
    """Returns the bytes inside the node and to other nodes, of a stage that sends equally much to its neighbors."""
    stage, stages = mesh.coordinate(rank).get(PIPE, 0), mesh.size(PIPE)
    along = mesh.group(rank, PIPE)
    peers = [along[other] for other in (stage - 1, stage + 1) if 0 <= other < stages]
    near = count_near(peers, rank, machine)
    inside = nbytes * near // max(len(peers), 1)
    return inside, nbytes - inside


_WEIGHT_GRADIENTS = 1 / 3
"""Largest share of a step's arithmetic in gradients of weights, during which a sum may be in flight."""


def exposed_seconds(flow: StepTotals, moved: Sequence[PlannedTransfer], machine: Machine) -> float:
    """Returns the seconds of a step in which a rank waits for exchanges between two computations, at least.

    The next computation needs the result of every exchange between tensor ranks, and of every ``all_to_all`` of
    sequences or experts. Only sums between tensor ranks in backward are hidden, each behind the gradient of one weight.
    """
    if machine.peak_flops <= 0:
        return 0.0
    tensor = sum(_seconds(t, machine) for t in moved if t.axis == TENSOR)
    others = sum(_seconds(t, machine) for t in moved if t.name == "all_to_all" and t.axis in (SEQUENCE, EXPERT))
    hidden = _WEIGHT_GRADIENTS * flow.flops / machine.peak_flops
    return others + tensor / 2 + max(0.0, tensor / 2 - hidden)


def _seconds(moved: PlannedTransfer, machine: Machine) -> float:
    return busiest_seconds(moved.inside, moved.between, machine)


def lower_bounds(flow: StepTotals, moved: Sequence[PlannedTransfer], machine: Machine) -> dict[str, float]:
    """Returns the seconds that each resource is busy in a step, at least; nothing where the rates are not known.

    All may work at once, so the step takes no less than the longest entry. Arithmetic and the exchanges that it waits
    for cannot work at once, so their sum is an entry of its own.
    """
    device = machine.device
    disk = max(flow.read, flow.written) * machine.devices_per_node
    amounts = {
        "arithmetic": (flow.flops, machine.peak_flops),
        "links inside the node": (sum(t.inside for t in moved), machine.link),
        "network between nodes": (sum(t.between for t in moved), machine.network),
        "link to the host": (max(flow.down, flow.up), device.host_link),
        "disk of the node": (disk, machine.disk),
    }
    found = {name: amount / rate for name, (amount, rate) in amounts.items() if rate > 0 and amount > 0}
    exposed = exposed_seconds(flow, moved, machine)
    if exposed > 0 and "arithmetic" in found:
        found["arithmetic, and exchanges that it waits for"] = found["arithmetic"] + exposed
    return found


_ROUNDING = 1e-6  # relative


def refuse_below_bounds(seconds: float, bounds: Mapping[str, float], what: str) -> None:
    """Raises DeepSpeedError where ``seconds`` of a predicted step are fewer than one of its lower bounds."""
    name = max(bounds, key=bounds.__getitem__, default="")
    if name and seconds < bounds[name] * (1 - _ROUNDING):
        raise DeepSpeedError(
            f"{what}: predicted to take {seconds:.4g} s, but {name} alone takes at least {bounds[name]:.4g} s. The "
            "planner computes both, so one of them is wrong; report the command, and believe neither"
        )
