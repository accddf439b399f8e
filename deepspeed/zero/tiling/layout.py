"""The flat layout: where every parameter lives. Pure arithmetic, no tensors, no process group.

Names used throughout the package:

- A **tile** is the part of one logical parameter that this rank's model holds. Without tensor or expert parallelism the
  tile is the whole parameter. (``zero.tiling.tiles``)
- A **bucket** lays tiles of one dtype, trainability and process group end to end in one flat 1-D buffer. Every tile
  starts at a multiple of ``BLOCK`` elements and the whole is padded to a multiple of ``num_slices * BLOCK``, so that
  no rank boundary ever cuts a block. (``BucketLayout``)
- Rank *r* owns the *r*-th equal slice of every bucket.
- A **fragment** is what one rank owns of one tile: an interval of the flattened tile. (``Fragment``)
- A **run** is the longest contiguous part of a rank's slice whose tiles belong to one optimizer param group. (``Run``)

The same layout serves every ZeRO stage, every offload device, the checkpoint files, and the planner.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepspeed.zero.tiling.tiles import Tile

BLOCK = 64
"""Elements per block: the unit of alignment, of rank boundaries, and of norms (``zero.gradient.gradient_sum``)."""

DATA = "data"
"""Name of the group of every parameter without another mark: all ranks that hold the same part of the model."""


def round_up(numel: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is not below ``numel``."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class Fragment:
    """The interval of one flattened tile that lies in one rank's slice."""

    tile: int  # index of the tile in its bucket
    rank: int  # whose slice
    tile_start: int  # first element of the interval in the flattened tile
    slice_start: int  # where that element lies in the rank's slice
    numel: int  # length in elements; never 0

    @property
    def tile_stop(self) -> int:
        """One past the last element in the flattened tile."""
        return self.tile_start + self.numel

    @property
    def in_tile(self) -> slice:
        """Indexes the flattened tile."""
        return slice(self.tile_start, self.tile_start + self.numel)

    @property
    def in_slice(self) -> slice:
        """Indexes a tensor as long as the rank's slice."""
        return slice(self.slice_start, self.slice_start + self.numel)


@dataclass(frozen=True)
class Run:
    """A contiguous part of one rank's slice whose tiles share an optimizer param group.

    ``start`` and ``stop`` are multiples of ``BLOCK`` in elements of the slice; padding inside belongs to the run, holds
    zeros, and stays zero under every elementwise optimizer.
    """

    param_group: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketLayout:
    """Tiles end to end in one flat buffer of ``num_slices`` equal slices."""

    index: int  # position among the buckets of the model
    tiles: tuple[Tile, ...]  # in buffer order
    starts: tuple[int, ...]  # first element of each tile in the buffer, a multiple of ``BLOCK``
    dtype: str  # name of the compute dtype, such as ``bfloat16``
    trainable: bool  # whether the tiles had ``requires_grad`` when the layout was made
    num_slices: int  # slices of the buffer, one for each rank that shares it
    numel: int  # elements of the whole buffer, padding included: a multiple of ``num_slices * replicas * BLOCK``
    group: str = DATA  # name of the group of ranks (``zero.group``)
    replicas: int = 1  # ranks that hold the same slice

    @property
    def slice_numel(self) -> int:
        """Elements that one rank owns."""
        return self.numel // self.num_slices

    @property
    def used_numel(self) -> int:
        """Elements of the tiles, padding not counted."""
        return sum(tile.numel for tile in self.tiles)

    @property
    def trained_numel(self) -> int:
        """Elements of the tiles that an optimizer has."""
        return sum(tile.numel for tile in self.tiles if tile.param_group >= 0)

    @property
    def has_parts(self) -> bool:
        """Returns whether some tile is not just the whole parameter of its name."""
        return any(tile.part is not None for tile in self.tiles)

    def slice_bounds(self, rank: int) -> tuple[int, int]:
        """Returns the extent of ``rank``'s slice in the buffer."""
        return rank * self.slice_numel, (rank + 1) * self.slice_numel

    def share_bounds(self, position: int, parts: int) -> tuple[int, int]:
        """Returns the first and last-plus-one element of one of ``parts`` equal parts of the buffer.

        Args:
            parts: How many there are: a multiple of ``num_slices`` by which the padded length can be divided.
        """
        return position * self.numel // parts, (position + 1) * self.numel // parts

    def fragment(self, tile: int, rank: int) -> Fragment | None:
        """Returns what ``rank`` owns of one tile, or None."""
        start, (lower, upper) = self.starts[tile], self.slice_bounds(rank)
        first, last = max(start, lower), min(start + self.tiles[tile].numel, upper)
        return Fragment(tile, rank, first - start, first - lower, last - first) if first < last else None

    def fragments(self, rank: int) -> tuple[Fragment, ...]:
        """Returns what ``rank`` owns of each tile, in buffer order. Tiles that it does not touch are left out."""
        return tuple(part for tile in range(len(self.tiles)) if (part := self.fragment(tile, rank)) is not None)

    def fragments_of(self, tile: int) -> list[Fragment]:
        """Returns what each rank owns of one tile, in order; together they cover it."""
        start, numel = self.starts[tile], self.tiles[tile].numel
        ranks = range(start // self.slice_numel, -(-(start + numel) // self.slice_numel)) if numel else range(0)
        return [part for rank in ranks if (part := self.fragment(tile, rank)) is not None]

    def runs(self, rank: int) -> tuple[Run, ...]:
        """Returns the runs of ``rank``'s slice, in order; elements without a param group are left out."""
        lower, upper = self.slice_bounds(rank)
        found: list[Run] = []
        ends = (*self.starts[1:], self.numel)
        for tile, start, end in zip(self.tiles, self.starts, ends, strict=True):
            first, last = max(start, lower), min(end, upper)
            if first >= last or tile.param_group < 0 or tile.numel == 0:
                continue
            if found and found[-1].param_group == tile.param_group and found[-1].stop == first - lower:
                found[-1] = Run(tile.param_group, found[-1].start, last - lower)
            else:
                found.append(Run(tile.param_group, first - lower, last - lower))
        return tuple(found)


def bucket_layout(
    index: int,
    tiles: Sequence[Tile],
    *,
    dtype: str,
    trainable: bool,
    num_slices: int,
    replicas: int = 1,
    group: str = DATA,
) -> BucketLayout:
    """Lays ``tiles`` end to end, those of one param group side by side so that a slice has few runs.

    Args:
        replicas: Ranks that hold the same slice, each of which must be divisible among them.
    """
    ordered = sorted(tiles, key=lambda tile: tile.param_group)  # stable: model order inside a group
    starts, end = [], 0
    for tile in ordered:
        starts.append(end)
        end += round_up(tile.numel, BLOCK)
    return BucketLayout(
        index=index,
        tiles=tuple(ordered),
        starts=tuple(starts),
        dtype=dtype,
        trainable=trainable,
        num_slices=num_slices,
        numel=round_up(end, num_slices * replicas * BLOCK),
        group=group,
        replicas=replicas,
    )


@dataclass(frozen=True)
class UnitTile:
    """A tile, and the properties that decide its bucket."""

    tile: Tile
    dtype: str
    trainable: bool
    group: str = DATA

    @property
    def kind(self) -> Kind:
        """Returns what the tiles of a bucket have in common."""
        return self.dtype, self.trainable, self.group


Kind = tuple[str, bool, str]
"""Dtype, trainability and group."""


@dataclass(frozen=True)
class SliceLayout:
    """Describes how a group cuts its buckets into slices."""

    ranks: int  # ranks that share a bucket
    copies: int = 1  # ranks that hold the same slice


@dataclass(frozen=True)
class Limits:
    """Holds the configured limits of sizes, in elements."""

    persistence: int = 100_000  # units up to this size are joined with their neighbors and stay gathered at stage 3
    model_persistence: int = 2**63 - 1  # total that may stay gathered
    joined: int = 500_000_000  # largest bucket that joining small neighbors may make
    # largest bucket of one unit; a bigger unit is split between tiles (a single bigger tile stays whole)
    unit: int = 500_000_000


@dataclass(frozen=True)
class ModelLayout:
    """Every bucket of a model."""

    buckets: tuple[BucketLayout, ...]  # in model order
    persistent: frozenset[int]  # indices of buckets that stay gathered at stage 3
    units: tuple[tuple[int, ...], ...]  # for each unit, the indices of the buckets that hold its tiles


def model_layout(
    units: Iterable[Sequence[UnitTile]], *, slice_layouts: Mapping[str, SliceLayout], limits: Limits
) -> ModelLayout:
    """Decides which tiles share a bucket.

    A unit (a repeated block, or what one module owns) makes one bucket per dtype, trainability and group, split where
    it passes ``limits.unit``. Neighboring units of at most ``limits.persistence`` elements are joined, so that many
    small tensors cost one collective; such buckets are the persistent ones.

    Args:
        units: For each unit its tiles in model order.
        slice_layouts: How the group of each name cuts its buckets.
    """
    buckets: list[BucketLayout] = []
    persistent: set[int] = set()
    unit_buckets: list[list[int]] = []
    open_small: dict[Kind, tuple[list[UnitTile], list[int]]] = {}
    persistent_numel = 0

    def close(kind: Kind, tiles: Sequence[UnitTile], members: Iterable[int], small: bool) -> None:
        nonlocal persistent_numel
        made = bucket_layout(
            len(buckets),
            [t.tile for t in tiles],
            dtype=kind[0],
            trainable=kind[1],
            num_slices=slice_layouts[kind[2]].ranks,
            replicas=slice_layouts[kind[2]].copies,
            group=kind[2],
        )
        if small and persistent_numel + made.used_numel <= limits.model_persistence:
            persistent.add(made.index)
            persistent_numel += made.used_numel
        buckets.append(made)
        for member in members:
            unit_buckets[member].append(made.index)

    def close_small(kind: Kind) -> None:
        tiles, members = open_small.pop(kind, ([], []))
        if tiles:
            close(kind, tiles, dict.fromkeys(members), small=True)

    for unit_index, unit in enumerate(units):
        unit_buckets.append([])
        kinds: dict[Kind, list[UnitTile]] = {}
        for entry in unit:
            kinds.setdefault(entry.kind, []).append(entry)
        for kind, entries in kinds.items():
            numel = sum(entry.tile.numel for entry in entries)
            if 0 < numel <= limits.persistence or numel == 0:
                waiting, members = open_small.setdefault(kind, ([], []))
                if sum(entry.tile.numel for entry in waiting) + numel > limits.joined:
                    close_small(kind)
                    waiting, members = open_small.setdefault(kind, ([], []))
                waiting.extend(entries)
                members.append(unit_index)
                continue
            for part in _split(entries, limits.unit):
                close(kind, part, (unit_index,), small=False)
    for kind in list(open_small):
        close_small(kind)
    return ModelLayout(
        buckets=tuple(buckets),
        persistent=frozenset(persistent),
        units=tuple(tuple(members) for members in unit_buckets),
    )


def _split(entries: Sequence[UnitTile], limit: int) -> list[list[UnitTile]]:
    """Cuts a unit between tiles so that each part has at most ``limit`` elements, or one tile."""
    parts: list[list[UnitTile]] = [[]]
    numel = 0
    for entry in entries:
        if parts[-1] and numel + entry.tile.numel > limit:
            parts.append([])
            numel = 0
        parts[-1].append(entry)
        numel += entry.tile.numel
    return parts
