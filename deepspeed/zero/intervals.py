"""Which rank owns which interval of a parameter, and what must travel when that changes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.zero.layout import BucketLayout


@dataclass(frozen=True)
class Part:
    """An interval of one flattened tile on the rank that owns it.

    Attributes:
        rank: The owner.
        tile_start: First element in the flattened tile.
        slice_start: Where that element lies in the owner's slice.
        numel: Length in elements; never 0.
    """

    rank: int
    tile_start: int
    slice_start: int
    numel: int

    @property
    def tile_stop(self) -> int:
        """One past the last element in the flattened tile."""
        return self.tile_start + self.numel


def tile_parts(layout: BucketLayout, tile: int) -> list[Part]:
    """The owners of one tile, in order; together they cover it. A rank occurs at most once."""
    start, numel, length = layout.starts[tile], layout.tiles[tile].numel, layout.slice_numel
    parts = []
    position = start
    while position < start + numel:
        rank = position // length
        stop = min(start + numel, (rank + 1) * length)
        parts.append(Part(rank, position - start, position - rank * length, stop - position))
        position = stop
    return parts


def part_of(layout: BucketLayout, tile: int, rank: int) -> Part | None:
    """What ``rank`` owns of one tile, or None."""
    start, length = layout.starts[tile], layout.slice_numel
    first, last = max(start, rank * length), min(start + layout.tiles[tile].numel, (rank + 1) * length)
    return Part(rank, first - start, first - rank * length, last - first) if first < last else None


@dataclass(frozen=True)
class Move:
    """An interval of a tile that changes its place.

    Attributes:
        source: The rank that has it.
        source_start: Where it begins in that rank's slice.
        target: The rank that shall have it; may be the source.
        target_start: Where it begins in that rank's slice.
        numel: Length in elements.
    """

    source: int
    source_start: int
    target: int
    target_start: int
    numel: int


def moves(old: Sequence[Part], new: Sequence[Part]) -> list[Move]:
    """What travels when a tile that lies in the parts ``old`` shall lie in the parts ``new``.

    Args:
        old: Parts that cover the tile, in order.
        new: Parts that cover the tile, in order.
    """
    found, first = [], 0
    for target in new:
        while first < len(old) and old[first].tile_stop <= target.tile_start:
            first += 1
        for source in old[first:]:
            start, stop = max(source.tile_start, target.tile_start), min(source.tile_stop, target.tile_stop)
            if start >= stop:
                break
            found.append(
                Move(
                    source=source.rank,
                    source_start=source.slice_start + start - source.tile_start,
                    target=target.rank,
                    target_start=target.slice_start + start - target.tile_start,
                    numel=stop - start,
                )
            )
    return found
