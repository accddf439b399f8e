"""A barrier at the rendezvous store before a call that cannot be interrupted.

Torch makes process groups in calls that block inside torch until every rank makes them, where the watchdog cannot
interrupt them. So the ranks pass a barrier first, which waits in short intervals and names ranks that diverge or end.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

from deepspeed.comm.base.batched_store import read_many
from deepspeed.comm.watch.watchdog import Watch


def store_barrier(watch: Watch, label: str, members: Sequence[int], timeout: timedelta, word: str = "") -> list[str]:
    """Waits until all ``members`` have come to the same call, in one round through the store.

    The label says what they are about to do, equal on all of them. ``members`` are their ranks, in one order; this rank
    is one. Either all of them send a ``word``, or none; the words are returned in their order.

    Raises:
        DivergenceError: Some of them wait for something else.
        CommunicationError: A member has ended, or did not arrive in time.
    """
    rendezvous = _BarrierRound(watch, label, tuple(members))
    if word:
        watch.store.set(f"{rendezvous.scope}/{watch.rank}", word)
    text = rendezvous.wait(timeout, has_words=bool(word))
    return list(json.loads(zlib.decompress(text))) if word else [""] * len(members)


def agree(watch: Watch, label: str, members: Sequence[int], timeout: timedelta, offers: Sequence[str]) -> list[str]:
    """Waits until all ``members`` have come to the same call; arguments and errors as in :func:`store_barrier`.

    Returns those of this rank's offers that every member made, in their order. A rank reads one key per offer of its
    own, for any number of ranks.
    """
    rendezvous = _BarrierRound(watch, label, tuple(members))
    for offer in offers:
        watch.store.add(f"{rendezvous.scope}/offer/{offer}", 1)
    rendezvous.wait(timeout)
    return [offer for offer in offers if watch.store.add(f"{rendezvous.scope}/offer/{offer}", 0) == len(members)]


class _BarrierRound:
    """One round through the store; each of ``ranks`` makes it once per call, and waits once."""

    def __init__(self, watch: Watch, label: str, ranks: tuple[int, ...]) -> None:
        self._watch, self._label, self._ranks = watch, label, ranks
        self._channel = f"barrier/{_digest(ranks)}/{label}"
        self._index = watch.issue(self._channel)
        self.scope = f"{watch.scope}/{self._channel}/{self._index}"  # begins the keys of this round

    def wait(self, timeout: timedelta, *, has_words: bool = False) -> bytes:
        """Waits until all ranks have written their values and reached this call.

        Returns the compressed words of all, which the last one has put together: else each rank would read as many as
        there are ranks. Empty without ``has_words``.
        """
        store = self._watch.store
        everything = f"{self.scope}/all"
        if store.add(f"{self.scope}/count", 1) == len(self._ranks):
            words = read_many(store, [f"{self.scope}/{rank}" for rank in self._ranks]) if has_words else []
            text = json.dumps([word.decode() for word in words])
            store.set(everything, zlib.compress(text.encode()))
        self._watch.wait_for_keys([everything], self._channel, self._index, self._label, self._ranks, timeout)
        return bytes(store.get(everything)) if has_words else b""


class SupervisedStore:
    """The job's store for an exchange in which all ``members`` take part; its waits are supervised."""

    def __init__(self, watch: Watch, label: str, members: Sequence[int]) -> None:
        self._watch = watch
        self._label = label
        self._members = tuple(members)
        self._channel = f"barrier/{_digest(self._members)}/{label}"
        self._index = watch.issue(self._channel)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Waits until ``keys`` are there.

        Raises:
            DivergenceError: Some member waits for something else.
            CommunicationError: A member has ended, or did not arrive in time.
        """
        self._watch.wait_for_keys(keys, self._channel, self._index, self._label, self._members, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watch.store, name)


@lru_cache(maxsize=64)
def _digest(ranks: tuple[int, ...]) -> str:
    return f"{zlib.crc32(repr(ranks).encode()):08x}"
