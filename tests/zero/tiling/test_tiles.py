"""What lies in one tiling of a parameter is found in any other: random tilings against element by element."""

import itertools
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from deepspeed.errors import NotYetSupportedError
from deepspeed.zero.tiling.parts import part_of_placements
from deepspeed.zero.tiling.tiles import CommonRun, Tile, TilePart, TileRegion, common_runs, first_overlap

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 9)),
    st.tuples(st.integers(1, 6), st.integers(1, 7)),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5)),
)


def numbers(tile: Tile) -> torch.Tensor:
    """The slow way: the flattened tile, each element the number of the logical element that lies there, or -1."""
    whole = torch.arange(prod(tile.global_shape)).view(tile.global_shape)
    out = torch.full(tile.shape, -1)
    for region in tile.regions:
        out[region.in_tile] = whole[region.in_whole]
    return out.view(-1)


@st.composite
def tilings(draw, shape: tuple[int, ...]) -> list[Tile]:
    """Tiles that together hold a parameter: every dimension cut anywhere, regions stacked with padding."""
    cuts = []
    for extent in shape:
        inner = draw(st.lists(st.integers(1, max(extent - 1, 1)), max_size=2)) if extent > 1 else []
        bounds = sorted({0, extent, *inner})
        cuts.append(list(itertools.pairwise(bounds)))
    cells = list(itertools.product(*cuts)) if prod(shape) else []
    count = draw(st.integers(1, 3))
    assignment: list[list[tuple[tuple[int, int], ...]]] = [[] for _ in range(count)]
    for cell in cells:
        assignment[draw(st.integers(0, count - 1))].append(cell)
    made = []
    for number, mine in enumerate(assignment):
        if not shape:
            regions = [TileRegion((), (), ()) for _ in mine]
            made.append(Tile(f"t{number}", (), part=TilePart("p", (), tuple(regions))))
            continue
        mine = draw(st.permutations(mine))
        axis = draw(st.integers(0, len(shape) - 1))  # along which the regions are put down
        regions, place = [], 0
        widest = [1] * len(shape)
        for cell in mine:
            place += draw(st.integers(0, 2))
            at = [draw(st.integers(0, 1)) for _ in shape]
            at[axis] = place
            extents = tuple(high - low for low, high in cell)
            regions.append(TileRegion(tuple(low for low, _ in cell), tuple(at), extents))
            place += extents[axis]
            widest = [max(w, a + e) for w, a, e in zip(widest, at, extents, strict=True)]
        widest[axis] = max(widest[axis], place) + draw(st.integers(0, 2))
        made.append(Tile(f"t{number}", tuple(widest), part=TilePart("p", shape, tuple(regions))))
    return made


@st.composite
def two_tilings(draw) -> tuple[list[Tile], list[Tile]]:
    shape = draw(SHAPES)
    return draw(tilings(shape)), [Tile("p", shape)] if draw(st.booleans()) else draw(tilings(shape))


@given(two_tilings(), st.data())
def test_spans_equal_those_of_the_elements(both, data):
    ours, theirs = both
    for tile in ours:
        start, stop = sorted(data.draw(st.integers(0, tile.numel)) for _ in range(2))
        here = numbers(tile)
        for other in theirs:
            there = {number: place for place, number in enumerate(numbers(other).tolist()) if number >= 0}
            expected = {
                (place, there[number])
                for place, number in enumerate(here.tolist())
                if start <= place < stop and number in there
            }
            found = [
                (s.start + i, s.other_start + i) for s in common_runs(tile, start, stop, other) for i in range(s.numel)
            ]
            assert len(found) == len(set(found)) and set(found) == expected


@given(two_tilings(), st.data())
def test_any_tiling_is_filled_from_any_other(both, data):
    """Each rank of each tile takes its slice of the flattened tile; together they have everything, padding is 0."""
    ours, theirs = both
    whole = torch.randn(theirs[0].global_shape)
    held = []
    for tile in theirs:
        values = torch.full(tile.shape, 7.0)  # padding of the others is nobody's value
        for region in tile.regions:
            values[region.in_tile] = whole[region.in_whole]
        held.append(values.view(-1))
    for tile in ours:
        ranks = data.draw(st.integers(1, 3))
        length = -(-tile.numel // ranks)
        out = torch.zeros(tile.numel)
        for rank in range(ranks):
            for other, values in zip(theirs, held, strict=True):
                for run in common_runs(tile, rank * length, min((rank + 1) * length, tile.numel), other):
                    part = values[run.other_start : run.other_start + run.numel]
                    out[run.start : run.start + run.numel] = part
        expected = torch.zeros(tile.shape)
        for region in tile.regions:
            expected[region.in_tile] = whole[region.in_whole]
        assert torch.equal(out.view(tile.shape), expected)
        assert tile.is_padded == (sum(region.numel for region in tile.regions) < tile.numel)


@given(SHAPES.flatmap(tilings))
def test_no_two_regions_of_a_tiling_overlap(tiling):
    regions = [(region.whole, region.shape) for tile in tiling for region in tile.regions]
    assert first_overlap(regions) is None
    assert sum(prod(extents) for _, extents in regions) == prod(tiling[0].global_shape)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 3), st.integers(1, 3)), max_size=6))
def test_overlaps_are_found(rows):
    regions = [((a, b), (m, n)) for a, b, m, n in rows]
    cells = [{(a + i, b + j) for i in range(m) for j in range(n)} for a, b, m, n in rows]
    overlapping = {pair for pair in itertools.combinations(range(len(rows)), 2) if cells[pair[0]] & cells[pair[1]]}
    found = first_overlap(regions)
    assert (found is None) == (not overlapping)
    assert found is None or tuple(sorted(found)) in overlapping


def test_how_many_spans_a_cut_costs():
    """One for rows, one per row for columns, and an interval asks for no more than it touches."""
    whole = Tile("w", (8, 6))
    rows = Tile("w", (4, 6), part=TilePart.cut("w", (8, 6), 0, [(4, 8)]))
    columns = Tile("w", (8, 3), part=TilePart.cut("w", (8, 6), 1, [(3, 6)]))
    assert list(common_runs(whole, 5, 40, whole)) == [CommonRun(5, 5, 35)]
    assert list(common_runs(rows, 0, 24, whole)) == [CommonRun(0, 24, 24)]
    assert list(common_runs(columns, 2, 8, whole)) == [CommonRun(2, 5, 1), CommonRun(3, 9, 3), CommonRun(6, 15, 2)]
    assert list(common_runs(rows, 0, 24, columns)) == [CommonRun(3 + 6 * row, 12 + 3 * row, 3) for row in range(4)]


def test_packed_uneven_and_padded():
    """Query, key and value in one tensor, the heads cut 2 : 1; a vocabulary of 7 rows rounded up to 8."""
    first = TilePart.cut("qkv", (9, 2), 0, [(0, 2), (3, 5), (6, 8)])
    assert [region.whole for region in first.regions] == [(0, 0), (3, 0), (6, 0)]
    assert [region.tile for region in first.regions] == [(0, 0), (2, 0), (4, 0)]
    tile = Tile("qkv", (6, 2), part=first)
    assert not tile.is_padded and [s.other_start for s in common_runs(tile, 0, 12, tile.whole())] == [0, 6, 12]
    last = Tile("wte", (4, 2), part=TilePart.cut("wte", (7, 2), 0, [(4, 7)]))
    assert last.is_padded and list(common_runs(last, 0, 8, last.whole())) == [CommonRun(0, 8, 6)]
    nothing = Tile("wte", (0, 2), part=TilePart.cut("wte", (7, 2), 0, [(7, 7)]))
    assert nothing.regions == () and list(common_runs(nothing, 0, 0, last)) == []


@pytest.mark.parametrize(
    ("shape", "regions", "words"),
    [
        ((2, 2), [TileRegion((0,), (0,), (2,))], "equally many"),
        ((2, 2), [TileRegion((3, 0), (0, 0), (2, 2))], "logical shape"),
        ((2, 2), [TileRegion((0, 0), (1, 0), (2, 2))], "inside the shape"),
        ((2, 2), [TileRegion((0, 0), (0, 0), (0, 2))], "inside"),
        ((4, 2), [TileRegion((0, 0), (0, 0), (2, 2)), TileRegion((1, 0), (2, 0), (2, 2))], "overlap in the logical"),
        ((3, 2), [TileRegion((0, 0), (0, 0), (2, 2)), TileRegion((2, 0), (1, 0), (2, 2))], "overlap in the tile"),
    ],
)
def test_impossible_parts_are_refused(shape, regions, words):
    with pytest.raises(ValueError, match=words):
        Tile("w", shape, part=TilePart("w", (4, 2), tuple(regions)))


@given(st.tuples(st.integers(0, 9), st.integers(1, 5)), st.data())
def test_placements_of_a_mesh(shape, data):
    """Against ``torch.chunk``, axis by axis."""
    mesh = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    placements = [Shard(data.draw(st.integers(-1, 1))) if data.draw(st.booleans()) else Replicate() for _ in mesh]
    whole = torch.arange(prod(shape)).view(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        mine = whole
        for size, place, placement in zip(mesh, coordinate, placements, strict=True):
            if isinstance(placement, Shard):
                chunks = mine.chunk(size, placement.dim)
                mine = chunks[place] if place < len(chunks) else mine.narrow(placement.dim, 0, 0)
        part = part_of_placements("p", shape, mesh, coordinate, placements)
        tile = Tile("p", tuple(mine.shape), part=part)
        assert torch.equal(numbers(tile), mine.reshape(-1)) and not tile.is_padded


def test_placements_that_give_no_part():
    for placement in (Partial(), _StridedShard(0, split_factor=2)):
        with pytest.raises(NotYetSupportedError, match="expected Shard or Replicate"):
            part_of_placements("p", (4,), [2], [0], [placement])
