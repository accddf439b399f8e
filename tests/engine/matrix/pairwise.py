"""A small greedy generator of pairwise covers: few rows in which every pair of values of two axes occurs."""

import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows that together hold every pair of values of every two axes; the same rows for the same axes.

    Each new row starts from a pair that is still missing; every further axis takes the value that adds most missing
    pairs with what the row has. Ties go to a value that a checksum picks: always the first would tie axes together.

    Args:
        axes: Name to values; values are hashable.
    """
    missing = {
        frozenset([(a, x), (b, y)]) for a, b in itertools.combinations(axes, 2) for x in axes[a] for y in axes[b]
    }
    order = sorted(missing, key=lambda pair: sorted(map(str, pair)))
    rows: list[Row] = []
    while missing:
        row: Row = dict(next(pair for pair in order if pair in missing))
        for name in sorted((name for name in axes if name not in row), key=lambda name: -len(axes[name])):
            values = list(axes[name])
            turn = zlib.crc32(f"{len(rows)} {name}".encode()) % len(values)
            gain = _gain(row, name, missing)
            row[name] = max(values[turn:] + values[:turn], key=gain)
        missing -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append({name: row[name] for name in axes})
    return rows


def every(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """The whole product."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _gain(row: Row, name: str, missing: set[frozenset[Any]]) -> Callable[[Any], int]:
    return lambda value: sum(frozenset([(name, value), item]) in missing for item in row.items())
