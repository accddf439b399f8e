"""Supervises blocking waits, so that ranks that wait for each other in vain say so instead of hanging.

Every transfer belongs to a channel (this engine's gathers, its reductions, its small exchanges), and on each channel
all ranks issue the same transfers in the same order. So "I wait for number *i* of channel *c*" can be compared between
ranks. A rank that has waited for a while posts what it waits for, and how far it has issued every channel, in the
rendezvous store, and reads the others' posts. If it waits for a transfer that the other has not issued, while the other
waits for one that it has not issued, neither can ever go on: that is certain, however stale the post is, because the
other's wait needs a transfer that this rank has not issued even now. Being late is never an error.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed.errors import CommunicationError, DivergenceError

_PERIOD = 0.2  # seconds between looks at the store, and the shortest wait worth one
_GRACE = 5.0  # seconds in which a broken connection may still turn out to be a divergence
_VERDICT = "verdict"


@dataclass(frozen=True)
class Awaited:
    """What a rank waits for: transfer number ``index`` of ``channel``, in words ``label``."""

    channel: str
    index: int
    label: str
    since: float


class Watch:
    """The waits of one rank in one group.

    Args:
        store: A torch ``Store`` that all ranks of the group share.
        scope: Prefix of its keys; equal on all ranks and unique to the group's life.
        rank: This rank in the group.
        size: Ranks in the group.
        abort: Makes pending waits of the group raise.
    """

    def __init__(self, store: Any, scope: str, rank: int, size: int, abort: Callable[[], None]) -> None:
        self._store = store
        self._scope = scope
        self._rank = rank
        self._size = size
        self._abort = abort
        self._owners = 0
        self._is_over = False
        self._issued: dict[str, int] = defaultdict(int)
        self._awaited: Awaited | None = None
        self._verdict: str | None = None
        self._thread: threading.Thread | None = None
        self.outside: Any = None  # the group's transport for what happens outside engines

    def stop(self) -> None:
        """Ends the watching thread: the group is gone."""
        self._is_over = True

    def next_owner(self) -> int:
        """Counts the engines of this group from 0."""
        self._owners += 1
        return self._owners - 1

    def issue(self, channel: str) -> int:
        """Counts a transfer that this rank takes part in now; returns its number on the channel."""
        self._issued[channel] += 1
        return self._issued[channel]

    def wait(self, blocking: Callable[[], Any], channel: str, index: int, label: str) -> None:
        """Runs a blocking wait.

        Raises:
            DivergenceError: What it waits for can never come.
            CommunicationError: The transfer failed otherwise.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watching, args=(weakref.ref(self),), name="deepspeed-watch", daemon=True
            )
            self._thread.start()
        self._awaited = Awaited(channel, index, label, time.monotonic())
        try:
            blocking()
        except RuntimeError as error:
            raise self._explain(error, label) from error
        finally:
            self._awaited = None

    def look_after_long_wait(self) -> bool:
        """What the watching thread does each period; returns whether it goes on."""
        awaited = self._awaited
        if self._is_over:
            return False
        if awaited is None or time.monotonic() - awaited.since < _PERIOD:
            return True
        try:
            self._verdict = self._look(awaited)
        except RuntimeError:
            return False  # the store went with the rank that held it; the waiting thread sees the broken connection
        if self._verdict is not None:
            self._abort()
        return self._verdict is None

    def _look(self, awaited: Awaited) -> str | None:
        """Posts what this rank waits for; returns the verdict if some rank and this one wait in vain."""
        issued = dict(self._issued)
        mine = {"channel": awaited.channel, "index": awaited.index, "label": awaited.label, "issued": issued}
        self._store.set(self._key(self._rank), json.dumps(mine))
        if self._store.check([self._key(_VERDICT)]):
            return self._read(_VERDICT)
        for rank in range(self._size):
            if rank == self._rank or not self._store.check([self._key(rank)]):
                continue
            post = json.loads(self._read(rank))
            they_lack = post["issued"].get(awaited.channel, 0) < awaited.index
            i_lack = issued.get(post["channel"], 0) < post["index"]
            if they_lack and i_lack:
                verdict = _sentence({self._rank: awaited.label, rank: post["label"]})
                self._store.set(self._key(_VERDICT), verdict)
                return verdict
        return None

    def _key(self, name: object) -> str:
        return f"{self._scope}/watch/{name}"

    def _read(self, name: object) -> str:
        value = self._store.get(self._key(name))
        return value.decode() if isinstance(value, bytes) else str(value)

    def _explain(self, error: RuntimeError, label: str) -> Exception:
        """A failed wait: by a verdict, this rank's or another's, or by something else."""
        deadline = time.monotonic() + _GRACE
        while self._verdict is None and time.monotonic() < deadline:
            try:
                if self._store.check([self._key(_VERDICT)]):
                    self._verdict = self._read(_VERDICT)
            except RuntimeError:
                break  # the store is gone: rank 0 died
            time.sleep(0.05)
        if self._verdict is not None:
            return DivergenceError(self._verdict)
        return CommunicationError(f"waiting for {label} failed; a peer has probably died or timed out: {error}")


def _watching(reference: weakref.ref[Watch]) -> None:
    """The watching thread. It must not keep the watch alive, and with it the process group and its sockets."""
    goes_on = True
    while goes_on:
        time.sleep(_PERIOD)
        watch = reference()
        goes_on = watch is not None and watch.look_after_long_wait()
        del watch


def _sentence(waiting: dict[int, str]) -> str:
    parts = "; ".join(f"rank {rank} waits for {label}" for rank, label in sorted(waiting.items()))
    return (
        f"ranks took different branches and wait for each other: {parts}. Every rank must use the same modules and "
        "make the same calls. Make the branch depend on data that is equal on all ranks, or mark the module that holds "
        "both branches with deepspeed.utils.set_z3_leaf_modules, so that it is gathered whole"
    )
