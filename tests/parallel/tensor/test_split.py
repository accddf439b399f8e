"""How dimensions and heads are dealt: every index once or as often as heads are shared, heads whole, pairs fitting."""

from hypothesis import given
from hypothesis import strategies as st

from deepspeed.parallel.tensor.split import Heads, Split, UnitAssignment, UnitRun, even


@given(st.integers(0, 60), st.integers(1, 9))
def test_even_parts_follow_each_other_and_differ_by_one(count, size):
    parts = [even(count, size, place) for place in range(size)]
    assert parts[0][0] == 0 and parts[-1][1] == count
    assert all(left[1] == right[0] for left, right in zip(parts, parts[1:], strict=False))
    lengths = [high - low for low, high in parts]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 12))
def test_query_heads_lie_beside_their_key_value_heads(key_value, shared_by, size):
    heads = Heads(key_value * shared_by, key_value, size)
    if heads.problem() is not None:
        return
    assignment = []
    for place in range(size):
        low, high = heads.of_query(place)
        first, last = heads.of_key_value(place)
        assert low < high and first < last
        assignment += range(low, high)
        # What a rank computes by itself, numbering its own heads from 0, is what the whole layer computes.
        shared = (high - low) // (last - first)
        for query in range(low, high):
            assert query // shared_by == first + (query - low) // shared
        start, stop = heads.replicas(place)
        assert start <= place < stop
        assert all(heads.of_key_value(other) == (first, last) for other in range(start, stop))
        if size <= key_value:
            assert (start, stop) == (place, place + 1)
    assert assignment == list(range(heads.query))


def test_what_cannot_be_dealt_raises_with_the_sizes():
    assert Heads(6, 2, 4).problem() is None
    assert "7 query heads are not a multiple of 2" in str(Heads(7, 2, 2).problem())
    assert "4 query heads are fewer than the 6 ranks" in str(Heads(4, 2, 6).problem())
    assert "3 key/value heads with 1 query heads each cannot be divided over 4" not in str(Heads(3, 3, 3).problem())


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_packed_parts_are_dealt_one_by_one(each, size, parts, grain):
    split = Split.evenly(each * parts, size, grain, parts)
    found = sorted(index for place in range(size) for low, high in split.intervals(place) for index in range(low, high))
    assert found == list(range(each * parts))
    for place in range(size):
        low, high = even(each, size, place) if grain == 1 or each % grain else (None, None)
        if low is not None:
            wanted = [part * each + index for part in range(parts) for index in range(low, high)]
            assert [i for a, b in split.intervals(place) for i in range(a, b)] == wanted


def test_packed_query_key_value():
    heads = Heads(6, 2, 2)
    runs = (
        UnitRun(0, 6, 4, UnitAssignment.AS_QUERIES),
        UnitRun(24, 2, 4, UnitAssignment.AS_KEYS),
        UnitRun(32, 2, 4, UnitAssignment.AS_KEYS),
    )
    split = Split(runs, 2, heads)
    assert split.intervals(0) == [(0, 12), (24, 28), (32, 36)] and split.intervals(1) == [(12, 24), (28, 32), (36, 40)]
    assert split.extent == 40 and split.width(1) == 20 and not split.shares_a_part()
    assert Split(runs, 4, Heads(6, 2, 4)).shares_a_part()
    assert Split.evenly(3, 5).ranks_without_units() == [3, 4]
