"""Cuts a list of items into consecutive parts, as pipelines cut layers into stages. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Returns running sums: entry i is the sum of the weights up to and with i."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Returns the parts of as equal a length as possible; the first ones get what is left over.

    Returns:
        ``num_parts + 1`` bounds: part i holds the items from ``bounds[i]`` up to ``bounds[i + 1]``. With fewer items
        than parts the last parts are empty.

    Raises:
        ValueError: ``num_parts`` is below 1 or ``num_items`` negative.
    """
    if num_parts < 1 or num_items < 0:
        raise ValueError(
            f"partition_uniform(num_items={num_items}, num_parts={num_parts}): items must be 0 or more, parts 1 or more"
        )
    size, longer = divmod(num_items, num_parts)
    return [part * size + min(part, longer) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Returns the parts whose weights differ little: the heaviest and the lightest are close.

    Only the best cut before each item is kept, so the result is nearly but not always optimal. Among equals the one
    with the lighter heaviest part wins. With enough items no part is empty. Weights are 0 or more; bounds are as in
    :func:`partition_uniform`.
    """
    num_items = len(weights)
    if num_items <= num_parts:
        return partition_uniform(num_items, num_parts)
    sums = [0.0, *prefix_sum_inc(weights)]
    # best[end]: (heaviest - lightest, heaviest, lightest, bounds) of the parts so far, which end there
    best = {end: (0.0, sums[end], sums[end], [0, end]) for end in range(1, num_items - num_parts + 2)}
    for part in range(2, num_parts + 1):
        first, last = (num_items, num_items) if part == num_parts else (part, num_items - num_parts + part)
        best = {end: _one_more(best, sums, end) for end in range(first, last + 1)}
    return best[num_items][3]


_Parts = tuple[float, float, float, list[int]]


def _one_more(best: dict[int, _Parts], sums: Sequence[float], end: int) -> _Parts:
    """Returns the best parts that end at ``end``, one more than those of ``best``."""
    found = []
    for start, (_, heaviest, lightest, bounds) in best.items():
        if start < end:
            weight = sums[end] - sums[start]
            heavy, light = max(heaviest, weight), min(lightest, weight)
            found.append((heavy - light, heavy, light, bounds))
    difference, heavy, light, bounds = min(found, key=lambda parts: parts[:2])
    return difference, heavy, light, [*bounds, end]
