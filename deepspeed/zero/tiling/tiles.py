"""Tiles: parameters as this rank's model holds them, and their part of the logical parameter. Pure arithmetic.

A **tile** is what one rank's model has of one logical parameter. As a rule that is all of it. Where a model is cut over
ranks (tensor, expert), the tile's **part** names the logical parameter, its shape, and the **regions** of it that lie
in the tile: one for a cut of rows or columns; several where one tensor packs several (query, key and value; the halves
of a gated MLP), where heads are uneven, or where experts are not side by side. Elements of a tile that lie in no region
are padding (a vocabulary that was rounded up): they belong to no logical parameter.

Regions suffice to find the elements of one tiling in another: :func:`common_runs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple


@dataclass(frozen=True)
class TileRegion:
    """A region of a logical parameter, and where it lies in a tile."""

    whole: tuple[int, ...]  # its first index in every dimension of the logical parameter
    tile: tuple[int, ...]  # its first index in every dimension of the tile
    shape: tuple[int, ...]  # its extents; none is 0

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def in_whole(self) -> tuple[slice, ...]:
        """Indexes the logical parameter."""
        return _slices(self.whole, self.shape)

    @property
    def in_tile(self) -> tuple[slice, ...]:
        """Indexes the tile."""
        return _slices(self.tile, self.shape)


def _slices(first: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(low, low + extent) for low, extent in zip(first, shape, strict=True))


@dataclass(frozen=True)
class TilePart:
    """Describes which part of its logical parameter a tile is."""

    name: str  # the name of the logical parameter; the same for all of its tiles
    global_shape: tuple[int, ...]
    regions: tuple[TileRegion, ...]  # its regions in the tile; they overlap neither there nor in the logical parameter

    @classmethod
    def all_of(cls, name: str, shape: tuple[int, ...]) -> TilePart:
        """Returns the part that is a whole logical parameter under another name, such as one of several experts."""
        return cls(name, shape, Tile(name, shape).regions)

    @classmethod
    def cut(cls, name: str, global_shape: tuple[int, ...], dim: int, intervals: Sequence[tuple[int, int]]) -> TilePart:
        """Returns the part of a tile that holds, one after the other along ``dim``, some intervals of it."""
        regions, place = [], 0
        for low, high in intervals:
            if low < high and 0 not in global_shape:
                whole, tile = [0] * len(global_shape), [0] * len(global_shape)
                whole[dim], tile[dim] = low, place
                shape = (*global_shape[:dim], high - low, *global_shape[dim + 1 :])
                regions.append(TileRegion(tuple(whole), tuple(tile), shape))
            place += high - low
        return cls(name, global_shape, tuple(regions))


@dataclass(frozen=True)
class Tile:
    """One parameter as this rank's model holds it.

    Raises:
        ValueError: The regions do not fit the shapes, or overlap.
    """

    name: str  # qualified name in the model; unique
    shape: tuple[int, ...]  # shape of the tile in elements
    param_group: int = -1  # index of the optimizer param group, or -1 for none (frozen, or no optimizer)
    part: TilePart | None = None  # its part of the logical parameter; None: all of it, under the same name

    def __post_init__(self) -> None:
        if self.part is not None:
            _check(self.name, self.shape, self.part)

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return prod(self.shape)

    @property
    def logical(self) -> str:
        """Name of the logical parameter."""
        return self.name if self.part is None else self.part.name

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the logical parameter."""
        return self.shape if self.part is None else self.part.global_shape

    @property
    def regions(self) -> tuple[TileRegion, ...]:
        """The regions of the logical parameter in this tile."""
        if self.part is not None:
            return self.part.regions
        nowhere = (0,) * len(self.shape)
        return (TileRegion(nowhere, nowhere, self.shape),) if self.numel else ()

    @property
    def is_padded(self) -> bool:
        """Returns whether some elements belong to no logical parameter."""
        return self.part is not None and sum(region.numel for region in self.part.regions) < self.numel

    def whole(self) -> Tile:
        """Returns the logical parameter as one tile."""
        return self if self.part is None else Tile(self.part.name, self.part.global_shape, self.param_group)

    def holds_same(self, other: Tile) -> bool:
        """Returns whether two tiles of one logical parameter have every element at the same place."""
        return self.shape == other.shape and (self.part == other.part or self.regions == other.regions)


def _check(name: str, shape: tuple[int, ...], part: TilePart) -> None:
    for region in part.regions:
        if not len(region.whole) == len(region.tile) == len(region.shape) == len(shape) == len(part.global_shape):
            raise ValueError(
                f"tile {name!r}: shape {shape}, logical shape {part.global_shape} and {region} must have equally many "
                "dimensions"
            )
        for first, extents, what in ((region.whole, part.global_shape, "logical shape"), (region.tile, shape, "shape")):
            if any(
                low < 0 or size < 1 or low + size > full
                for low, size, full in zip(first, region.shape, extents, strict=True)
            ):
                raise ValueError(f"tile {name!r}: {region} does not lie inside the {what} {extents}")
    in_whole = first_overlap([(region.whole, region.shape) for region in part.regions])
    in_tile = first_overlap([(region.tile, region.shape) for region in part.regions])
    for pair, what in ((in_whole, "the logical parameter"), (in_tile, "the tile")):
        if pair is not None:
            raise ValueError(f"tile {name!r}: {part.regions[pair[0]]} and {part.regions[pair[1]]} overlap in {what}")


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and extent in every dimension of one tensor; a :class:`TileRegion` is a box in two of them."""


def first_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Returns the indices of two boxes of one tensor that overlap; None if no two do.

    Sweeps along the dimension with the most different first indices, so that boxes cut along one dimension are not
    compared pair by pair.
    """
    if len(boxes) < 2:
        return None
    dims = range(len(boxes[0][0]))
    axis = max(dims, key=lambda dim: len({first[dim] for first, _ in boxes}), default=None)
    if axis is None:
        return 0, 1  # scalars
    open_: list[int] = []
    for number in sorted(range(len(boxes)), key=lambda index: boxes[index][0][axis]):
        first, _ = boxes[number]
        open_ = [other for other in open_ if boxes[other][0][axis] + boxes[other][1][axis] > first[axis]]
        for other in open_:
            if _common(boxes[other], boxes[number]) is not None:
                return other, number
        open_.append(number)
    return None


def _common(one: Box, other: Box) -> Box | None:
    """Returns the intersection of two boxes."""
    first = tuple(map(max, one[0], other[0]))
    shape = tuple(
        min(a + m, b + n) - low for a, m, b, n, low in zip(one[0], one[1], other[0], other[1], first, strict=True)
    )
    return (first, shape) if all(extent > 0 for extent in shape) else None


def in_common(one: TileRegion, other: TileRegion) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Returns what two regions of one logical parameter share, as indices into the tile of each; None: nothing."""
    common = _common((one.whole, one.shape), (other.whole, other.shape))
    if common is None:
        return None
    first, shape = common
    places = [
        [low - w + t for low, w, t in zip(first, region.whole, region.tile, strict=True)] for region in (one, other)
    ]
    return _slices(tuple(places[0]), shape), _slices(tuple(places[1]), shape)


class CommonRun(NamedTuple):
    """Elements that are contiguous in two flattened tiles."""

    start: int  # the first in the one tile
    other_start: int  # the first in the other
    numel: int  # how many; never 0


def common_runs(tile: Tile, start: int, stop: int, other: Tile) -> Iterator[CommonRun]:
    """Yields where elements ``[start, stop)`` of the flattened ``tile`` lie in the flattened ``other``.

    Both are tiles of one logical parameter, cut in any way; what ``other`` does not have, and padding, is left out.
    The runs of two regions come in order.
    """
    if start < stop:
        for mine in tile.regions:
            for theirs in other.regions:
                yield from _common_runs(mine, tile.shape, start, stop, theirs, other.shape)


def _common_runs(
    mine: TileRegion, shape: tuple[int, ...], start: int, stop: int, theirs: TileRegion, other_shape: tuple[int, ...]
) -> Iterator[CommonRun]:
    common = _common((mine.whole, mine.shape), (theirs.whole, theirs.shape))
    if common is None:
        return
    first, extents = common
    strides, other_strides = _strides(shape), _strides(other_shape)
    here = sum((f - w + t) * s for f, w, t, s in zip(first, mine.whole, mine.tile, strides, strict=True))
    there = sum((f - w + t) * s for f, w, t, s in zip(first, theirs.whole, theirs.tile, other_strides, strict=True))
    inner = len(extents)  # dimensions from here on are one run
    length = 1
    while inner:
        inner -= 1
        length *= extents[inner]
        if not extents[inner] == shape[inner] == other_shape[inner]:
            break

    def walk(dim: int, here: int, there: int) -> Iterator[CommonRun]:
        if dim == inner:
            low, high = max(here, start), min(here + length, stop)
            if low < high:
                yield CommonRun(low, there + low - here, high - low)
            return
        stride, other_stride = strides[dim], other_strides[dim]
        for index in range(max(0, (start - here) // stride), min(extents[dim], -((here - stop) // stride))):
            yield from walk(dim + 1, here + index * stride, there + index * other_stride)

    yield from walk(0, here, there)


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return strides[::-1]
