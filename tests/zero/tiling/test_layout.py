"""Properties of the pure layout, for any parameters, groups, dtypes, limits and world size. No processes."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed.zero.tiling.layout import (
    BLOCK,
    BucketLayout,
    Limits,
    ModelLayout,
    SliceLayout,
    UnitTile,
    bucket_layout,
    model_layout,
)
from deepspeed.zero.tiling.tiles import Tile

WORLD = st.integers(1, 9)
SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 300)),
    st.tuples(st.integers(0, 40), st.integers(0, 20)),
    st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(1, 7)),
)


@st.composite
def tiles(draw, groups=(-1, 0, 1, 2)):
    shapes = draw(st.lists(SHAPES, min_size=1, max_size=12))
    return [Tile(f"p{i}", shape, draw(st.sampled_from(groups))) for i, shape in enumerate(shapes)]


@st.composite
def buckets(draw):
    return bucket_layout(0, draw(tiles()), dtype="float32", trainable=True, num_slices=draw(WORLD))


@st.composite
def models(draw):
    """Units of tiles with mixed dtypes and trainability."""
    units, number = [], 0
    for _ in range(draw(st.integers(1, 6))):
        unit = []
        for tile in draw(tiles()):
            kind = draw(st.sampled_from(["float32", "bfloat16", "float64"])), draw(st.booleans())
            group = draw(st.integers(0, 2)) if kind[1] else -1
            unit.append(UnitTile(Tile(f"{number}.{tile.name}", tile.shape, group), *kind))
        units.append(unit)
        number += 1
    limits = Limits(
        persistence=draw(st.sampled_from([0, 1, 100, 700, 10**6])),
        model_persistence=draw(st.sampled_from([0, 500, 10**9])),
        joined=draw(st.sampled_from([1, 300, 10**9])),
        unit=draw(st.sampled_from([1, 64, 900, 10**9])),
    )
    return units, limits, draw(WORLD)


def ranks_of(bucket: BucketLayout, offset: int) -> list[int]:
    """Tiles that hold an element of the buffer."""
    places = enumerate(zip(bucket.starts, bucket.tiles, strict=True))
    return [index for index, (start, tile) in places if start <= offset < start + tile.numel]


@given(buckets())
def test_every_element_is_owned_exactly_once(bucket: BucketLayout):
    owned: Counter[tuple[int, int]] = Counter()
    for rank in range(bucket.num_slices):
        for fragment in bucket.fragments(rank):
            assert fragment.numel > 0
            owned.update((fragment.tile, fragment.tile_start + i) for i in range(fragment.numel))
    expected = {(index, element) for index, tile in enumerate(bucket.tiles) for element in range(tile.numel)}
    assert set(owned) == expected and set(owned.values()) <= {1}


@given(buckets())
def test_a_fragment_lies_where_its_tile_lies(bucket: BucketLayout):
    for rank in range(bucket.num_slices):
        lower, upper = bucket.slice_bounds(rank)
        for fragment in bucket.fragments(rank):
            in_buffer = bucket.starts[fragment.tile] + fragment.tile_start
            assert in_buffer == lower + fragment.slice_start
            assert lower <= in_buffer and in_buffer + fragment.numel <= upper


@given(buckets())
def test_alignment_and_padding(bucket: BucketLayout):
    assert bucket.numel % (bucket.num_slices * BLOCK) == 0
    assert all(start % BLOCK == 0 for start in bucket.starts)
    assert bucket.slice_numel * bucket.num_slices == bucket.numel
    assert [bucket.slice_bounds(r)[0] for r in range(bucket.num_slices)] == [
        r * bucket.slice_numel for r in range(bucket.num_slices)
    ]
    # The least padding that the two alignments allow.
    blocks = sum(-(-tile.numel // BLOCK) for tile in bucket.tiles)
    assert bucket.numel - blocks * BLOCK < bucket.num_slices * BLOCK
    ends = [start + tile.numel for start, tile in zip(bucket.starts, bucket.tiles, strict=True)]
    assert all(end <= start for end, start in zip(ends, (*bucket.starts[1:], bucket.numel), strict=True))


@given(buckets())
def test_runs_cover_exactly_the_tiles_with_a_group(bucket: BucketLayout):
    for rank in range(bucket.num_slices):
        lower, _ = bucket.slice_bounds(rank)
        group_of = {}
        for run in bucket.runs(rank):
            assert run.start % BLOCK == 0 and run.stop % BLOCK == 0 and run.start < run.stop
            assert run.stop <= bucket.slice_numel and run.param_group >= 0
            for element in range(run.start, run.stop):
                assert element not in group_of, "runs overlap"
                group_of[element] = run.param_group
        for fragment in bucket.fragments(rank):
            group = bucket.tiles[fragment.tile].param_group
            for element in range(fragment.slice_start, fragment.slice_start + fragment.numel):
                assert group_of.get(element, -1) == group
        used = {e for f in bucket.fragments(rank) for e in range(f.slice_start, f.slice_start + f.numel)}
        for element in set(group_of) - used:
            assert not ranks_of(bucket, lower + element), "what a run holds besides its tiles is padding"


@given(buckets())
def test_runs_are_as_long_as_they_can_be(bucket: BucketLayout):
    for rank in range(bucket.num_slices):
        runs = bucket.runs(rank)
        for first, second in zip(runs, runs[1:], strict=False):
            assert first.stop <= second.start
            assert first.stop < second.start or first.param_group != second.param_group
        assert len({run.param_group for run in runs}) == len(runs), "tiles of a group lie side by side"


@given(buckets())
def test_fragments_of_a_tile_are_those_of_its_ranks(bucket: BucketLayout):
    by_rank = [fragment for rank in range(bucket.num_slices) for fragment in bucket.fragments(rank)]
    for tile in range(len(bucket.tiles)):
        assert bucket.fragments_of(tile) == [fragment for fragment in by_rank if fragment.tile == tile]


@given(tiles(), WORLD, WORLD)
def test_the_order_of_tiles_does_not_depend_on_the_world_size(some, one, other):
    first, second = (bucket_layout(0, some, dtype="float32", trainable=True, num_slices=w) for w in (one, other))
    assert first.tiles == second.tiles and first.starts == second.starts


@settings(max_examples=60)
@given(models())
def test_every_tile_lies_in_one_bucket_of_its_kind(model):
    units, limits, world = model
    layout: ModelLayout = model_layout(units, slice_layouts={"data": SliceLayout(world)}, limits=limits)
    kinds = {entry.tile.name: (entry.dtype, entry.trainable) for unit in units for entry in unit}
    seen = Counter(tile.name for bucket in layout.buckets for tile in bucket.tiles)
    assert set(seen) == set(kinds) and set(seen.values()) == {1}
    for position, bucket in enumerate(layout.buckets):
        assert bucket.index == position and bucket.num_slices == world
        assert {kinds[tile.name] for tile in bucket.tiles} == {(bucket.dtype, bucket.trainable)}


@settings(max_examples=60)
@given(models())
def test_units_name_the_buckets_of_their_tiles(model):
    units, limits, world = model
    layout = model_layout(units, slice_layouts={"data": SliceLayout(world)}, limits=limits)
    bucket_of = {tile.name: bucket.index for bucket in layout.buckets for tile in bucket.tiles}
    for unit, indices in zip(units, layout.units, strict=True):
        assert {bucket_of[entry.tile.name] for entry in unit} == set(indices)
        assert len(indices) == len(set(indices))


@settings(max_examples=60)
@given(models())
def test_limits(model):
    units, limits, world = model
    layout = model_layout(units, slice_layouts={"data": SliceLayout(world)}, limits=limits)
    size_of_unit = {}
    for number, unit in enumerate(units):
        for entry in unit:
            key = (number, entry.dtype, entry.trainable)
            size_of_unit[key] = size_of_unit.get(key, 0) + entry.tile.numel
    unit_of = {entry.tile.name: number for number, unit in enumerate(units) for entry in unit}
    persistent_numel = 0
    for bucket in layout.buckets:
        members = {unit_of[tile.name] for tile in bucket.tiles}
        biggest = max(size_of_unit[(m, bucket.dtype, bucket.trainable)] for m in members)
        if len(members) > 1:
            assert biggest <= limits.persistence, "only small units are joined"
            assert bucket.used_numel <= limits.joined
        elif biggest > limits.persistence:
            one_tile = len([tile for tile in bucket.tiles if tile.numel]) <= 1
            assert bucket.used_numel <= limits.unit or one_tile
        if bucket.index in layout.persistent:
            assert biggest <= limits.persistence
            persistent_numel += bucket.used_numel
    assert persistent_numel <= limits.model_persistence
    if limits.persistence == 0:
        assert all(layout.buckets[index].used_numel == 0 for index in layout.persistent)
