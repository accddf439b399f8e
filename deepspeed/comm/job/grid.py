"""A grid of ranks: ranks along one axis share the slices of a buffer, those along the other hold the same slices.

Neighbors share (they are near each other: a node): the mesh has the axes ``replicate`` and, faster, ``shard``.

If something is cut over *all* ranks of the grid, a rank's part must lie inside its slice. So parts are numbered by
*position*: first along the sharing axis, then along the other (:class:`GridTransport`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from typing_extensions import override

from deepspeed.axes import DATA
from deepspeed.comm.job.connect import warm_up
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh, data_mesh
from deepspeed.comm.job.new_groups import Owner
from deepspeed.comm.transports.transport import TensorTransfer, Transport, Work
from deepspeed.errors import DeepSpeedConfigError

SHARD, REPLICATE = "shard", "replicate"


def grid_mesh(size: int, shard_size: int) -> Mesh:
    """Returns ``size`` ranks of which ``shard_size`` neighbors share slices.

    Those along the other axis hold the same ones.
    """
    return data_mesh(size).split(DATA, REPLICATE, (SHARD, shard_size))


class _TwoStepGather:
    """A gather in two steps; ``wait`` issues the second after the first."""

    def __init__(self, grid: GridTransport, flat: torch.Tensor, key: int, label: str) -> None:
        self._grid = grid
        self._flat: torch.Tensor | None = flat
        self._key = key
        self._label = label
        self._first = grid.replicas_axis.all_gather(grid.shard_axis.my_slice(flat), key=key, label=label)

    def will_arrive(self) -> bool:
        """Returns whether all peers are known to have sent their part, so that waiting needs no further call."""
        return self._flat is None

    def wait(self) -> None:
        """Blocks (host or current stream) until the result is in place. Later calls return at once."""
        if self._flat is None:
            return
        flat, self._flat = self._flat, None
        self._first.wait()
        self._grid.shard_axis.all_gather(flat, key=self._key, label=self._label).wait()


class GridTransport(Transport):
    """All ranks of a grid, numbered by position. Gathers and moves only: sums go along one axis at a time."""

    name = "grid"

    def __init__(self, shard_axis: Transport, replicas_axis: Transport, everyone: Transport) -> None:
        position = shard_axis.rank * replicas_axis.size + replicas_axis.rank
        super().__init__(everyone.group, position, everyone.size)
        self.ranks = everyone.ranks
        self.shard_axis = shard_axis  # the ranks that share slices
        self.replicas_axis = replicas_axis  # the ranks that hold the same slices
        self.belongs_to(everyone)
        self.is_watched_by(everyone.watch)

    @override
    def rank_at(self, position: int) -> int:
        along_shards, along_replicas = divmod(position, self.replicas_axis.size)
        return along_replicas * self.shard_axis.size + along_shards

    @override
    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        return _TwoStepGather(self, flat, key, label)

    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        """Gathers 1-D tensors as rows of a 2-D one, as the base class does: in the order of ranks, not of positions."""
        return self.peers.gather_small(tensor, channel=channel, label=label)

    @override
    def move(self, transfers: Sequence[TensorTransfer], *, label: str) -> None:
        self.peers.move(
            [
                replace(
                    transfer,
                    source=self.rank_at(transfer.source),
                    target=None if transfer.target is None else self.rank_at(transfer.target),
                )
                for transfer in transfers
            ],
            label=label,
        )

    @override
    def next_move(self, label: str = "") -> int:
        return self.peers.next_move(label)


@dataclass(frozen=True)
class Grid:
    """The transports of one engine over a grid of ranks."""

    gather: Transport  # carries parameters between the ranks that share slices
    reduce: Transport  # carries gradients between them
    combine: Transport  # carries sums between the ranks with the same slices
    positions: GridTransport  # all ranks, by position


def create_grid(
    job: Job,
    shard_size: int,
    *,
    group: Any = None,
    device: torch.device | None = None,
    timeout: timedelta | None = None,
    by_nodes: bool = False,
    islands: int = 1,
) -> Grid:
    """Makes the transports of a grid. Every rank of the default group must call it, in the same order.

    Args:
        shard_size: Ranks that share slices; a proper divisor of the number of ranks, and more than one.
        group: The ranks of the grid; they must be all there are, or one of the islands. None: the default group.
        by_nodes: Gather in two steps where the groups span nodes, see ``Connector.by_nodes``.
        islands: How many such groups of consecutive ranks there are, each with a grid of its own.

    Raises:
        DeepSpeedConfigError: ``group`` has fewer ranks than there are, or nodes are cut.
    """
    everyone = job.axis_of(group).transport(device=device, timeout=timeout)
    if everyone.size * islands != job.ranks.size_of():
        raise DeepSpeedConfigError(
            f"zero_hpz_partition_size and mics_shard_size: expected every rank to be data-parallel, found "
            f"{everyone.size} data-parallel ranks of {job.ranks.size_of()}. Leave the mpu out, or the key"
        )
    mesh = grid_mesh(everyone.size, shard_size)
    sharing, same = (
        [[island * everyone.size + rank for rank in ranks] for island in range(islands) for ranks in mesh.groups(axis)]
        for axis in (SHARD, REPLICATE)
    )
    shard_group = _group_along(job, sharing, "the ranks that share slices", device, timeout)
    reduce_group = shard_group
    if everyone.needs_one_order:
        reduce_group = _group_along(job, sharing, "their gradients", device, timeout)
    same_group = _group_along(job, same, "the ranks with the same slices", device, timeout)
    made = {
        "gather": job.connector.subgroup_of(everyone, shard_group, SHARD),
        "reduce": job.connector.subgroup_of(everyone, reduce_group, SHARD),
        "combine": job.connector.subgroup_of(everyone, same_group, REPLICATE),
    }
    if by_nodes:
        made["gather"] = job.connector.by_nodes(
            made["gather"], everyone, mesh.groups(SHARD), device=device, timeout=timeout
        )
    for transport in (*made.values(), everyone):
        warm_up(transport)
    return Grid(**made, positions=GridTransport(made["gather"], made["combine"], everyone))


def island_groups(job: Job, size: int, island_size: int, device: torch.device, timeout: timedelta) -> tuple[Any, Any]:
    """Returns the process group of this rank's island, and that of the ranks with its place on theirs.

    Every rank must call it. An island is ``island_size`` consecutive ranks, which divide ``size``, all of the job.
    """
    mesh = grid_mesh(size, island_size)
    return (
        _group_along(job, mesh.groups(SHARD), "islands", device, timeout, "job"),
        _group_along(job, mesh.groups(REPLICATE), "outer steps of islands", device, timeout, "job"),
    )


def _group_along(
    job: Job,
    groups: Sequence[Sequence[int]],
    why: str,
    device: torch.device | None,
    timeout: timedelta | None,
    owner: Owner = "engine",
) -> Any:
    backend = job.ranks.backend_for(job.ranks.world, device)
    return job.process_groups.mine(groups, backend=backend, timeout=timeout, why=why, owner=owner)
