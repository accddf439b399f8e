"""When 0/1 Adam updates its variance: section 4 of arXiv 2202.06009."""

from __future__ import annotations


def updates_of_variance(last: int, scaler: int) -> frozenset[int]:
    """Returns the updates, counted from 1, in which the variance is updated.

    The gap after the *j*-th of them, counted from 0, is ``2 ** (j // scaler)``: about ``scaler * log2(last / scaler)``
    updates.

    Args:
        last: None is after it.
        scaler: After so many updates of the variance the gap doubles.
    """
    found, number = [], 1
    while number <= last:
        found.append(number)
        number += 2 ** ((len(found) - 1) // scaler)
    return frozenset(found)
