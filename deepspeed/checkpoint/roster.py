"""Lists the buckets of all ranks that save together: every bucket once, with its number in the checkpoint.

If one group of ranks shares everything, any rank knows the list. Otherwise (model-parallel ranks, separate groups for
some parameters) the first rank of each group sends the others its buckets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed.checkpoint.exchange import Exchange
from deepspeed.checkpoint.run_state import RunState
from deepspeed.errors import CheckpointError
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.tiling.layout import BucketLayout
from deepspeed.zero.tiling.tiles import Tile, TileRegion


@dataclass(frozen=True)
class Listed:
    """A bucket of the model."""

    rank: int  # the rank that stands for it, among those that save together
    layout: BucketLayout  # its tiles; the index is that on its own ranks
    frozen: tuple[bool, ...]  # whether each tile's parameter has no gradient
    is_trained: bool  # whether there is a master


@dataclass
class Roster:
    """All buckets of the model."""

    listed: tuple[Listed, ...]  # in the order of the checkpoint
    # index of each of this rank's buckets to its number there; those that other ranks stand for, along the axes on
    # which their tiles are whole, are left out
    numbers: Mapping[int, int]
    aliases: dict[str, str]  # further names of tied parameters and buffers
    buffers: frozenset[str]  # names of persistent buffers that this rank writes
    # the extra state of modules that other ranks have, by state-dict key
    extra_state: dict[str, Any] = field(default_factory=dict)

    @property
    def buckets(self) -> tuple[BucketLayout, ...]:
        """Layouts of all buckets, numbered as in the manifest."""
        return tuple(replace(entry.layout, index=number) for number, entry in enumerate(self.listed))

    def _tiles(self) -> Iterator[tuple[Tile, bool, Listed]]:
        for entry in self.listed:
            for tile, is_frozen in zip(entry.layout.tiles, entry.frozen, strict=True):
                yield tile, is_frozen, entry

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every logical parameter."""
        return {tile.logical: tile.global_shape for tile, _, _ in self._tiles()}

    def frozen(self) -> list[str]:
        """Returns the logical parameters without gradient."""
        return list(dict.fromkeys(tile.logical for tile, is_frozen, _ in self._tiles() if is_frozen))

    def idle(self) -> list[str]:
        """Returns those of them that have no master."""
        left = (tile.logical for tile, is_frozen, entry in self._tiles() if is_frozen and not entry.is_trained)
        return list(dict.fromkeys(left))

    def group_names(self, rank: int, count: int) -> list[list[str]]:
        """Returns the names of the logical parameters in each of ``count`` param groups of ``rank``.

        Only those of buckets that the rank stands for.
        """
        groups: list[dict[str, None]] = [{} for _ in range(count)]
        for tile, _, entry in self._tiles():
            if entry.rank == rank and entry.is_trained and 0 <= tile.param_group < count:
                groups[tile.param_group][tile.logical] = None
        return [list(names) for names in groups]


def roster(run_state: RunState, exchange: Exchange) -> Roster:
    """Lists the model. Every rank that saves must call it; communicates only where the ranks have different buckets."""
    runtime = run_state.runtime
    counted = [bucket for bucket in runtime.buckets if bucket.group.is_primary_replica]
    aliases, buffers = run_state.aliases(), list(run_state.buffers())
    if run_state.is_one_part:
        listed = tuple(_listed(run_state, bucket, 0) for bucket in counted)
        numbers = {bucket.index: number for number, bucket in enumerate(counted)}
        return Roster(listed, numbers, aliases, frozenset(buffers if exchange.rank == 0 else ()))

    def mine() -> _Gathered:
        listed = [_listed(run_state, bucket, exchange.rank) for bucket in counted if bucket.group.place == 0]
        is_first = runtime.groups.peers.rank == 0
        if is_first:
            return listed, aliases, buffers, run_state.extra_state()
        return listed, {}, sorted(run_state.own_buffers()), run_state.own_extra_state()

    gathered = exchange.together("listing the model", mine)
    everything = tuple(entry for listed, *_ in gathered for entry in listed)
    _refuse_copies(everything)
    places = {(entry.rank, entry.layout.index): number for number, entry in enumerate(everything)}
    numbers = {bucket.index: places[_leader(bucket, exchange.rank), bucket.index] for bucket in counted}
    merged = Roster(everything, numbers, {}, frozenset())
    taken: set[str] = set()
    for rank, (_, their_aliases, their_buffers, their_extra) in enumerate(gathered):
        merged.aliases = {**their_aliases, **merged.aliases}
        merged.extra_state = {**their_extra, **merged.extra_state}
        if rank == exchange.rank:
            merged.buffers = frozenset(their_buffers) - taken
        taken.update(their_buffers)
    return merged


def names_elsewhere(run_state: RunState, exchange: Exchange) -> set[str]:
    """Returns the parameters, buffers and extra states that other ranks have, by all of their names.

    Empty where all ranks have the same.

    Every rank that loads must call it.
    """
    if run_state.is_one_part:
        return set()
    mine = [*run_state.shapes(), *run_state.aliases(), *run_state.buffers(), *run_state.extra_state_owners()]
    is_first = any(bucket.group.place == 0 for bucket in run_state.runtime.buckets)
    gathered = exchange.gather(mine if is_first else [], "comparing the names of the model")
    return {name for names in gathered for name in names}


_Gathered = tuple[list[Listed], dict[str, str], list[str], dict[str, Any]]


def _refuse_copies(listed: tuple[Listed, ...]) -> None:
    """Raises if two ranks would write one tile: an undeclared copy, or an undeclared part."""
    found: dict[tuple[str, tuple[TileRegion, ...]], int] = {}
    for entry in listed:
        for tile in entry.layout.tiles:
            if tile.regions and found.setdefault((tile.logical, tile.regions), entry.rank) != entry.rank:
                what = "whole" if tile.part is None else "the same part"
                raise CheckpointError(
                    f"save_checkpoint: parameter {tile.logical!r} is {what} on rank "
                    f"{found[tile.logical, tile.regions]} and again on rank {entry.rank}, where one of the "
                    "two must be a replica. If the ranks hold different parts of it, set on it, before initialize, "
                    "tensor_model_parallel = True and partition_dim = <the dimension that is cut>, as Megatron does"
                )


def _listed(run_state: RunState, bucket: Bucket, rank: int) -> Listed:
    frozen = tuple(not parameter.requires_grad for parameter in bucket.params)
    return Listed(rank, bucket.layout, frozen, run_state.runtime.master_of(bucket) is not None)


def _leader(bucket: Bucket, me: int) -> int:
    """Returns the first of the ranks that share a bucket, in the job; ``me`` where no other rank does."""
    group, peers = bucket.group, bucket.group.gather.peers
    everyone = peers.ranks or (me,)
    return next((ranks for ranks in group.ranks if everyone[peers.rank] in ranks), everyone)[0]
