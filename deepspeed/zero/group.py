"""Bucket groups: which ranks share a bucket, which hold the same slices of it, and which decide together.

Every bucket has one group, and the groups of a model may differ: an expert's parameters are shared by the ranks that
hold that expert, the others by all data-parallel ranks. Code uses the bucket's group and never depends on the number of
axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch

from deepspeed import comm
from deepspeed.axes import TENSOR
from deepspeed.comm.base.codec import Codec
from deepspeed.comm.base.counters import JOB
from deepspeed.comm.codecs.coded import CodedTransport, coded
from deepspeed.comm.codecs.rows import by_rows
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.job.connect import warm_up
from deepspeed.comm.job.declared_groups import Defined
from deepspeed.comm.job.grid import create_grid
from deepspeed.comm.job.groups import get_tensor_model_parallel_group
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mpu import RankCoordinates
from deepspeed.comm.job.new_groups import Lease
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.placement import Placement
from deepspeed.zero.tiling.describe import CUT, Description
from deepspeed.zero.tiling.layout import DATA, SliceLayout


@dataclass(frozen=True)
class BucketGroup:
    """The ranks that share one bucket, with their roles."""

    name: str  # equal on all ranks, also where they are in different groups of that name
    gather: Transport  # carries parameters between the ranks that share slices
    reduce: Transport  # carries gradients between the same ranks
    # the ranks among which masters are cut, numbered as they are cut: ``gather``, or with it the ranks with the same
    # slices (``comm.job.grid.GridTransport``)
    owners: Transport
    # carries sums between the ranks that hold the same slices; None where no others do
    combine: Transport | None = None
    divisor: int = 1  # divides a sum over all ranks of the group to give the mean
    # whether this rank writes checkpoints and enters norms for the ranks that hold the same tiles and are in another
    # group of that name (tensor-parallel ranks, for what is not cut there)
    is_primary_replica: bool = True
    # the ranks, in the job, of all groups of that name; empty where the peers are one group
    ranks: tuple[tuple[int, ...], ...] = ()
    # whether tensor-parallel ranks have different parts of the parameters; of ranks with equal parts one counts
    is_part: bool = False
    # the ranks that hold the same slices have different parts of the model otherwise (tied weights on several stages of
    # a pipeline): sums over them wait for the update, and code that edits one copy must edit all
    spans_stages: bool = False
    gather_codec: Codec | None = None  # codec of parameters that are gathered for use; None: uncompressed
    frozen_codec: Codec | None = None  # the same for parameters that were frozen when their buckets were made
    # codec of gradients in the updates before ``reduce_codec`` begins; None: uncompressed
    early_codec: Codec | None = None
    # codec of gradients, between the ranks that share slices and then between those with the same slices; None:
    # uncompressed
    reduce_codec: Codec | None = None
    reduces_rows: bool = False  # only the nonzero rows of gradients are sent

    @classmethod
    def over(cls, gather: Transport, reduce: Transport | None = None, *, name: str = DATA) -> BucketGroup:
        """Returns the ranks that share everything: parameters, gradients and masters."""
        return cls(name, gather, reduce or gather, gather, divisor=gather.size)

    def parameter_transport(self, *, trainable: bool) -> Transport:
        """Returns the transport of gathers for use, which may be lossy; ``gather`` is exact."""
        return coded(self.gather, self.gather_codec if trainable else self.frozen_codec)

    @cached_property
    def gradient_transport(self) -> Transport:
        """Transport of gradients between the ranks that share slices; may be lossy."""
        return by_rows(self.reduce) if self.reduces_rows else coded(self.reduce, self.reduce_codec)

    @cached_property
    def early_gradient_transport(self) -> Transport:
        """The same in updates before ``reduce_codec`` begins."""
        return by_rows(self.reduce) if self.reduces_rows else coded(self.reduce, self.early_codec)

    @cached_property
    def combine_transport(self) -> Transport | None:
        """Transport of sums between the ranks that hold the same slices; may be lossy."""
        return self._between_copies(self.reduce_codec)

    @cached_property
    def early_combine_transport(self) -> Transport | None:
        """The same in updates before ``reduce_codec`` begins."""
        return self._between_copies(self.early_codec)

    def _between_copies(self, codec: Codec | None) -> Transport | None:
        # Sums with ranks that have other parts of the model are exact: their layouts may differ.
        return self.combine if self.combine is None or self.spans_stages else coded(self.combine, codec)

    @property
    def feeds_back(self) -> bool:
        """Returns whether a rank keeps what reductions lose of its gradients."""
        both = (self.gradient_transport, self.combine_transport)
        return any(isinstance(transport, CodedTransport) and transport.codec.feeds_back for transport in both)

    @property
    def size(self) -> int:
        """Ranks that share slices."""
        return self.gather.size

    @property
    def replicas(self) -> int:
        """Ranks that hold the same slice, among those with the same part of the model."""
        return 1 if self.combine is None or self.spans_stages else self.combine.size

    @property
    def is_spread(self) -> bool:
        """Returns whether masters are cut further than the parameters: over the ranks with the same slices too."""
        return self.owners is not self.gather

    @property
    def slice_layout(self) -> SliceLayout:
        """How the group cuts its buckets."""
        return SliceLayout(self.size, self.replicas)

    def place_of(self, peer: int) -> tuple[int, int]:
        """Returns a peer's number among the ranks with the same slice, and its number among those that share.

        For a peer in another group of that name, both numbers are those in that group.
        """
        if not self.ranks:
            return divmod(peer, self.size)
        ranks = self.gather.peers.ranks
        if not ranks:
            return 0, 0
        rank = ranks[peer]
        return 0, next(members.index(rank) for members in self.ranks if rank in members)

    @property
    def place(self) -> int:
        """This rank's number, from 0, where something is divided evenly among all ranks of the group."""
        among_copies = 0 if self.combine is None or self.spans_stages else self.combine.rank
        return self.gather.rank * self.replicas + among_copies

    @property
    def transports(self) -> Iterator[Transport]:
        """Every transport; some may come twice."""
        yield from (self.gather, self.reduce, self.owners)
        if self.combine is not None:
            yield self.combine


@dataclass(frozen=True)
class Groups:
    """The groups of one engine."""

    by_name: Mapping[str, BucketGroup]  # the group of every name that occurs
    peers: Transport  # the ranks with the same part of the model: they make the same calls
    job: Transport  # all ranks that decide about an update together
    # the ranks with the other parts, for groups with ``is_part``; None if there are none, or the program's mpu does not
    # know them
    other_parts: Axis | None = None
    lease: Lease | None = None  # the process groups that nothing else uses; see :meth:`give_back`
    owner: int = -1  # the number of the engine, equal on all ranks; a copy with other codecs keeps it

    def __post_init__(self) -> None:
        if self.owner < 0:
            object.__setattr__(self, "owner", self.peers.next_owner())
        for transport in (self.peers, self.job, *(one for group in self for one in group.transports)):
            transport.owner = self.owner
        for group in self:
            group.gather.companion = group.reduce

    @classmethod
    def of(cls, *groups: BucketGroup, lease: Lease | None = None) -> Groups:
        """Makes the groups of a model that has one part."""
        peers = groups[0].reduce.peers
        return cls({group.name: group for group in groups}, peers, peers, lease=lease)

    def coded(
        self,
        gather: Codec | None,
        reduce: Codec | None,
        *,
        frozen: Codec | None = None,
        early: Codec | None = None,
    ) -> Groups:
        """Returns the same groups with codecs; every rank must call it.

        Args:
            early: Codec of gradients in earlier updates; None: uncompressed.
            frozen: Codec of gathered parameters that are frozen from the start; None: as ``gather``.
        """
        codecs = {
            "gather_codec": gather,
            "frozen_codec": frozen or gather,
            "reduce_codec": reduce,
            "early_codec": early,
        }
        of_rows = {**codecs, "reduce_codec": None, "early_codec": None}
        named = {
            group.name: replace(group, **(of_rows if group.reduces_rows else codecs))  # type: ignore[arg-type]
            for group in self
        }
        return replace(self, by_name=named)

    def give_back(self) -> None:
        """Returns the process groups of this engine, which must not train any more, for reuse by the next one."""
        if self.lease is not None:
            self.lease.give_back()

    def __iter__(self) -> Iterator[BucketGroup]:
        """Returns every group, in an order that is equal on all ranks."""
        return iter(self.by_name.values())

    def __getitem__(self, name: str) -> BucketGroup:
        """Returns the group of that name."""
        return self.by_name[name]

    def name_of(self, parameter: str, described: Description) -> str:
        """Returns the group of a parameter.

        Raises:
            DeepSpeedConfigError: They name a group that is not defined.
        """
        name = described.group
        if name == CUT and CUT not in self.by_name:
            return DATA  # there are no other parts of it: one model-parallel rank, or a program that declares none
        if name not in self.by_name:
            raise DeepSpeedConfigError(
                f"the parameter {parameter!r} belongs to the group {name!r}, which is not defined; known are "
                f"{', '.join(map(repr, self.by_name))}. Call deepspeed.comm.define_group({name!r}, ranks) on "
                "every rank before the model is built"
            )
        return name

    @property
    def has_all_flags(self) -> bool:
        """Returns whether every rank has the flags of gradients of every other one."""
        return self.job is self.peers and len(self.by_name) == 1

    def among_peers(self, group: BucketGroup) -> list[int] | None:
        """Returns the numbers, among the peers, of the ranks of a group; None where these are all of them."""
        if group.combine is not None or group.size == self.peers.size:
            return None
        ranks = group.gather.ranks
        return [self.peers.ranks.index(rank) for rank in ranks] if ranks else [self.peers.rank]

    @property
    def gathering(self) -> Transport:
        """Transport over the ranks that must gather in one order: all that share parameters, directly or indirectly."""
        first, *others = self
        return first.gather if not others else self.peers


def create_groups(
    job: Job,
    placement: Placement,
    ranks: RankCoordinates,
    device: torch.device,
    *,
    by_nodes: bool,
    divisor: int | None = None,
    copies: Mapping[str, bool] = MappingProxyType({}),
) -> Groups:
    """Makes the groups. Every rank of the job must call it, in the same order.

    Args:
        by_nodes: Gather in two steps where the ranks span nodes.
        divisor: Divisor of summed gradients; None: the number of data-parallel ranks.
        copies: Further groups over all data-parallel ranks, by name: parameters that some but not all tensor-parallel
            ranks have alike, and frozen bases. The value is whether this rank counts among those that have them alike.

    Raises:
        DeepSpeedConfigError: Groups that cannot be used together.
    """
    with job.process_groups.leased() as lease:
        return _groups_over(job, lease, placement, ranks, device, by_nodes=by_nodes, divisor=divisor, copies=copies)


def _groups_over(
    job: Job,
    lease: Lease,
    placement: Placement,
    ranks: RankCoordinates,
    device: torch.device,
    *,
    by_nodes: bool,
    divisor: int | None,
    copies: Mapping[str, bool],
) -> Groups:
    """Makes the groups with the process groups of ``lease``; for the rest see :func:`create_groups`."""
    timeout = comm.default_timeout()
    divisor = ranks.data_size if divisor is None else divisor
    defined = job.declared.defined()
    if placement.shard_ranks is not None:
        if others := (*defined, *copies):
            key = "zero_hpz_partition_size" if placement.spread_master else "mics_shard_size"
            raise DeepSpeedConfigError(
                f"zero_optimization.{key} {placement.shard_ranks} with {', '.join(map(_named, others))}: expected all "
                "parameters to be sharded over the same ranks, but these are sharded over ranks of their own. Leave "
                f"{key} out, or train without what it is combined with here"
            )
        grid = create_grid(
            job,
            placement.shard_ranks,
            group=ranks.zero_group,
            device=device,
            timeout=timeout,
            by_nodes=by_nodes,
            islands=ranks.islands,
        )
        owners = grid.positions if placement.spread_master else grid.gather
        return Groups.of(BucketGroup(DATA, grid.gather, grid.reduce, owners, grid.combine, divisor), lease=lease)
    gather, reduce = (job.axis_of(ranks.zero_group).transport(device=device, timeout=timeout) for _ in range(2))
    if by_nodes:
        gather = job.connector.by_nodes(gather, gather, [range(gather.size)], device=device, timeout=timeout)
    data = BucketGroup(DATA, gather, reduce, gather, divisor=divisor)
    own = [_own_group(job, one, reduce, divisor, ranks, device) for one in defined.values() if not one.spans_stages]
    if ranks.model_size == 1:
        groups = Groups.of(data, *(replace(data, name=name) for name in copies), *own, lease=lease)
    else:
        # Parameters that are whole on tensor ranks count on the first of them; of cut ones every rank's part counts.
        whole, cut = replace(data, is_primary_replica=ranks.tensor_rank == 0), replace(data, name=CUT, is_part=True)
        shared = (
            replace(data, name=name, is_primary_replica=is_primary, is_part=True) for name, is_primary in copies.items()
        )
        tied = (_copies(job, one, cut if one.is_cut else whole, device) for one in defined.values() if one.spans_stages)
        parts = (whole, cut, *shared, *own, *tied)
        everybody = job.axis_of(name=JOB).transport(device=device, timeout=timeout)
        group = get_tensor_model_parallel_group() if ranks.mesh.size(TENSOR) > 1 else None
        tensor = None if group is None else job.axis_of(group, TENSOR)
        groups = Groups({group.name: group for group in parts}, reduce, everybody, tensor, lease)
    for transport in dict.fromkeys((gather, groups.job, *(group.gather for group in own))):
        warm_up(transport)
    return groups


def _named(group: str) -> str:
    """Returns a group of parameters, by what made it."""
    size = group.removeprefix("ep_size_")
    return f"expert layers of ep_size {size}" if size != group else f"the parameters of {group!r}"


def _copies(job: Job, defined: Defined, data: BucketGroup, device: torch.device) -> BucketGroup:
    """Returns the group of weights tied to ranks with other parts of the model, of which the first counts."""
    combine = job.declared.connect_copies(defined, device=device, timeout=comm.default_timeout())
    if combine is None:
        return replace(data, name=defined.name)
    is_primary = data.is_primary_replica and combine.rank == 0
    return replace(data, name=defined.name, combine=combine, is_primary_replica=is_primary, spans_stages=True)


def _own_group(
    job: Job, defined: Defined, peers: Transport, divisor: int, ranks: RankCoordinates, device: torch.device
) -> BucketGroup:
    if defined.name in (DATA, CUT):
        raise DeepSpeedConfigError(f"define_group({defined.name!r}): the name is reserved; choose another one")
    gather, reduce = (
        job.declared.connect(defined, peers, use, device=device, timeout=comm.default_timeout())
        for use in ("parameters", "gradients")
    )
    divisor = divisor if defined.divisor is None else defined.divisor
    is_primary = not defined.is_whole or ranks.tensor_rank == 0
    return BucketGroup(
        defined.name, gather, reduce, gather, divisor=divisor, is_primary_replica=is_primary, ranks=defined.ranks
    )
