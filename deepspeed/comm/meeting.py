"""Ranks that meet at the rendezvous store before a call that nothing can end.

Torch makes process groups in calls that block inside torch until every rank makes them, and no watch reaches in there.
So the ranks meet first, where a wait is many short looks: one that goes another way, or whose program ends, is named.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from deepspeed.comm.watch import Watch


def meet(watch: Watch, label: str, members: Sequence[int], timeout: timedelta, word: str = "") -> list[str]:
    """Waits until all ``members`` have come to the same call, in one round through the store.

    Args:
        watch: The job's.
        label: What they are about to do, in words; equal on all of them.
        members: Their ranks, in one order; this rank is one.
        timeout: How long to wait.
        word: Something to tell the others.

    Returns:
        The word of each member.

    Raises:
        DivergenceError: Some of them wait for something else.
        CommunicationError: One has ended, or did not come in time.
    """
    ranks = tuple(members)
    channel = f"meeting/{_digest(ranks)}/{label}"
    index = watch.issue(channel)
    scope = f"{watch.scope}/{channel}/{index}"
    watch.store.set(f"{scope}/{watch.rank}", word)
    if watch.store.add(f"{scope}/count", 1) == len(ranks):
        watch.store.set(f"{scope}/all", "")
    watch.wait_for_keys([f"{scope}/all"], channel, index, label, ranks, timeout)
    return [watch.store.get(f"{scope}/{rank}").decode() for rank in ranks] if word else [""] * len(ranks)


class SupervisedStore:
    """The job's store for an exchange in which all ``members`` take part; its waits are supervised.

    Args:
        watch: The job's.
        label: The exchange, in words; equal on all members.
        members: Their ranks.
    """

    def __init__(self, watch: Watch, label: str, members: Sequence[int]) -> None:
        self._watch = watch
        self._label = label
        self._members = tuple(members)
        self._channel = f"meeting/{_digest(self._members)}/{label}"
        self._index = watch.issue(self._channel)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Waits until ``keys`` are there.

        Raises:
            DivergenceError: Some member waits for something else.
            CommunicationError: One has ended, or did not come in time.
        """
        self._watch.wait_for_keys(keys, self._channel, self._index, self._label, self._members, timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watch.store, name)


def _digest(ranks: tuple[int, ...]) -> str:
    return f"{zlib.crc32(repr(ranks).encode()):08x}"
