"""Batches operations of the rendezvous store: with one per key, thousands of ranks would start slowly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

# Keys in one message.
_MOST_AT_ONCE = 2048
# Ranks of a job that poll for a key. More of them wait at the store, which is less work for
# it, but for each wait that ends without the key torch prints two lines on every rank.
MOST_THAT_POLL = 1024
_POLLS_PER_SECOND = 4_000  # of all ranks, when they have waited for a while: a quarter of what a store answers


def read_many(store: Any, keys: Sequence[str]) -> list[bytes]:
    """Returns the values of ``keys`` of a torch ``Store``, which must all be there."""
    if not _has_calls_for_many(store):
        return [store.get(key) for key in keys]
    found: list[bytes] = []
    for at in range(0, len(keys), _MOST_AT_ONCE):
        found += store.multi_get(list(keys[at : at + _MOST_AT_ONCE]))
    return found


def write_many(store: Any, values: Mapping[str, str]) -> None:
    """Sets several keys of a torch ``Store``."""
    if not _has_calls_for_many(store):
        for key, value in values.items():
            store.set(key, value)
        return
    keys = list(values)
    for at in range(0, len(keys), _MOST_AT_ONCE):
        some = keys[at : at + _MOST_AT_ONCE]
        store.multi_set(some, [values[key] for key in some])


def those_there(store: Any, keys: Sequence[str]) -> list[str]:
    """Returns those of ``keys`` that are set in a torch ``Store``: by one query if all are, or by bisection."""
    if not keys:
        return []
    if len(keys) <= _MOST_AT_ONCE and store.check(list(keys)):
        return list(keys)
    if len(keys) == 1:
        return []
    half = len(keys) // 2
    return those_there(store, keys[:half]) + those_there(store, keys[half:])


def longest_pause(ranks: int, least: float) -> float:
    """Returns the longest interval between two polls of a key by one of ``ranks``, in seconds, at least ``least``."""
    return max(least, ranks / _POLLS_PER_SECOND)


def wait_at_store(store: Any, key: str, ranks: int) -> bool:
    """Waits up to a few seconds until ``key`` is set, in one blocking operation of the store; returns whether it is.

    The connection to the store serves nothing else meanwhile, and an interrupt of the program is seen afterwards. The
    more ``ranks`` wait alike, the longer a wait, since each that ends without the key costs the store.

    Raises:
        RuntimeError: The store is gone.
    """
    try:
        store.wait([key], timedelta(seconds=max(1.0, ranks / 2_000)))
    except RuntimeError:  # time limit, or the store is gone: then the query below raises too
        return bool(store.check([key]))
    return True


def _has_calls_for_many(store: Any) -> bool:
    has = getattr(store, "has_extended_api", None)
    return bool(callable(has) and has())
