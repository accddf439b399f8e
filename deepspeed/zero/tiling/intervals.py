"""What must travel when the fragments of a tile change their owners. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.zero.tiling.layout import Fragment


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


def moves(old: Sequence[Fragment], new: Sequence[Fragment]) -> list[Move]:
    """Returns what travels when a tile that lies in the fragments ``old`` shall lie in the fragments ``new``.

    Args:
        old: Fragments that cover the tile, in order.
        new: Fragments that cover the tile, in order.
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
