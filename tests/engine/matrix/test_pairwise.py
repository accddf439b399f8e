"""The generator of pairwise covers."""

import itertools
from math import prod

from tests.engine.matrix.cells import AXES, SIDE_AXES
from tests.engine.matrix.pairwise import every, pairwise


def test_every_pair_occurs_and_the_cover_is_small():
    axes = {**AXES, **SIDE_AXES}
    rows = pairwise(axes)
    for a, b in itertools.combinations(axes, 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(axes[a], axes[b])), (a, b)
    largest, second = sorted((len(values) for values in axes.values()), reverse=True)[:2]
    assert largest * second <= len(rows) <= 1.3 * largest * second
    assert rows == pairwise(axes), "the same cover every time"


def test_axes_are_not_tied_together():
    """In a greedy cover two small axes may always go together unless ties are broken differently for each."""
    rows = pairwise({**AXES, **SIDE_AXES})
    together = sum(row["overflow"] == (row["accumulation"] > 1) for row in rows) / len(rows)
    assert 0.3 < together < 0.7


def test_the_whole_product():
    axes = {"a": [1, 2], "b": "xyz"}
    assert len(every(axes)) == prod(len(values) for values in axes.values()) == 6
    assert every(axes)[1] == {"a": 1, "b": "y"}
