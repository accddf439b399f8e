"""Who gets which attention heads and which tokens: plain arithmetic, without torch and without processes.

A *share* is a range of one axis of a tensor. The shares of tokens are disjoint and cover the sequence. Those of heads
are too, unless there are fewer key and value heads than ranks: then neighbours have the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from deepspeed.errors import DeepSpeedConfigError

Share = tuple[int, int]
"""Start and end along an axis."""


def in_equal_parts(length: int, ranks: int) -> tuple[Share, ...]:
    """Parts as equal as possible, the first ones longer by one where ``ranks`` does not divide ``length``."""
    size, longer = divmod(length, ranks)
    return one_after_another([size + (rank < longer) for rank in range(ranks)])


def one_after_another(lengths: Sequence[int]) -> tuple[Share, ...]:
    """Parts of these lengths."""
    ends = list(accumulate(lengths))
    return tuple((end - length, end) for end, length in zip(ends, lengths, strict=True))


def length_of(share: Share) -> int:
    """Elements of a share."""
    return share[1] - share[0]


@dataclass(frozen=True)
class HeadAssignment:
    """The heads that each rank attends with.

    Attributes:
        query: By rank, its query heads.
        key: By rank, the key and value heads that these use.
    """

    query: tuple[Share, ...]
    key: tuple[Share, ...]


def shares_of_heads(heads: int, key_heads: int, ranks: int) -> HeadAssignment:
    """Divides attention heads over ranks, so that every query head is where its key and value head is.

    With at least as many key heads as ranks these are divided and query heads follow (7 key heads over 4 ranks: 2, 2,
    2, 1). With fewer, the ranks are divided over the key heads, and those that have the same one divide its query
    heads; no rank gets a head that it does not use. On every rank all key heads have equally many query heads.

    Args:
        heads: Query heads, a multiple of ``key_heads``.
        key_heads: Key and value heads.
        ranks: Ranks that share a sequence.

    Raises:
        DeepSpeedConfigError: Some rank would have no head.
    """
    if key_heads < 1 or heads % key_heads:
        raise DeepSpeedConfigError(
            f"sequence parallel: expected a number of attention heads that is a multiple of the number of key heads, "
            f"found {heads} and {key_heads}"
        )
    group = heads // key_heads
    if key_heads >= ranks:
        key = in_equal_parts(key_heads, ranks)
        return HeadAssignment(tuple((start * group, end * group) for start, end in key), key)
    if group < -(-ranks // key_heads):
        raise DeepSpeedConfigError(
            f"sequence parallel: {heads} heads with {key_heads} key head(s) cannot be divided over {ranks} "
            f"ranks, as some rank would have none; use at most {key_heads * group} ranks that divide them, or "
            'sequence_parallel.mode "ring", which has no such limit'
        )
    query: list[Share] = []
    keys: list[Share] = []
    for head, (first, last) in enumerate(in_equal_parts(ranks, key_heads)):
        parts = in_equal_parts(group, last - first)
        query += [(head * group + start, head * group + end) for start, end in parts]
        keys += [(head, head + 1)] * len(parts)
    return HeadAssignment(tuple(query), tuple(keys))
