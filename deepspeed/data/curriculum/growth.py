"""The published formula by which a difficulty, a sequence length or a number of tokens grows with the step."""

from __future__ import annotations

import math


def grown(step: int, *, low: int, high: int, steps: int, granularity: int, degree: float = 1) -> int:
    """Returns the value at ``step``: from ``low`` to ``high`` as the ``degree``-th root of the share of the steps gone.

    ``floor((step / steps) ** (1 / degree) * (high - low) + low)``, rounded down to a multiple of ``granularity``, but
    never below the least multiple that ``low`` allows nor above ``high``.

    Args:
        step: Number of the step, from 0.
        low: Value at step 0.
        high: Value in the end: from ``steps`` on, or a little later where it is no multiple of ``granularity``.
        steps: Steps of the growth.
        granularity: Values are multiples of it, ``high`` apart.
        degree: 1 grows linearly, 2 as the square root.
    """
    value = math.floor((step / steps) ** (1 / degree) * (high - low) + low)
    value = max(value - value % granularity, math.ceil(low / granularity) * granularity)
    return min(value, high)
