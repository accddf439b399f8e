"""Ends a start of process groups that a rank has left by dying: gloo would wait for it until the time limit.

A launcher of this package ends the other ranks. Plain ``python`` in several shells, ``mpirun`` or a cluster may not. So
every rank watches the processes of the other ranks on its own machine, and posts for the ranks of other machines which
one has ended.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from deepspeed.comm.start.rendezvous import release_store
from deepspeed.comm.watch.processes import has_ended
from deepspeed.errors import CommunicationError

_PERIOD_SECONDS = 0.25
_POSTED_SECONDS = 1.0  # between two looks for what ranks of other machines have posted
# A rank that has started its groups may end at once, before this one has seen that they are complete.
_GRACE_SECONDS = 2.0
_STORE_SECONDS = 5.0
_ABANDON_SECONDS = 4.0
_LOST = "deepspeed/start/lost"


def start_supervised(start: Callable[[], None], store: Any, neighbors: Mapping[int, str]) -> None:
    """Calls ``start``, which may block in torch. Every rank must call it.

    Runs it in a thread of its own, since nothing interrupts it; if a rank is lost, the thread is abandoned. ``start``
    must not compute on a device. ``neighbors`` are the processes of the other ranks of this machine, by rank.

    Raises:
        CommunicationError: A rank has ended meanwhile.
    """
    failures: list[BaseException] = []

    def work() -> None:
        try:
            start()
        except BaseException as error:
            failures.append(error)

    posts = store.clone()  # the first connection serves ``start``
    posts.set_timeout(timedelta(seconds=_STORE_SECONDS))
    thread = threading.Thread(target=work, name="deepspeed-start", daemon=True)
    thread.start()
    lost, look_at = None, time.monotonic() + _POSTED_SECONDS
    while thread.is_alive() and lost is None:
        thread.join(_PERIOD_SECONDS)
        lost = _lost_among(neighbors)
        if lost is None and thread.is_alive() and time.monotonic() > look_at:
            look_at = time.monotonic() + _POSTED_SECONDS
            lost = _posted(posts)
    thread.join(_GRACE_SECONDS)
    if not thread.is_alive() and not failures:
        return
    lost = lost or _lost_among(neighbors)
    if lost is not None:
        with contextlib.suppress(RuntimeError):  # the store has ended with the lost rank
            posts.set(_LOST, lost)
        # The end of the store ends the abandoned threads of all ranks: one that returned from torch while the
        # interpreter ends would abort the process.
        release_store()
        thread.join(_ABANDON_SECONDS)
        raise CommunicationError(lost)
    raise failures[0]


def _lost_among(neighbors: Mapping[int, str]) -> str | None:
    ended = next((rank for rank, process in neighbors.items() if has_ended(process)), None)
    if ended is None:
        return None
    return (
        f"rank {ended} has ended after the rendezvous, before the process group was started. Look for its error, and "
        "start all ranks again"
    )


def _posted(store: Any) -> str | None:
    try:
        return store.get(_LOST).decode() if store.check([_LOST]) else None
    except RuntimeError:  # the store has ended, which ends the start too
        return None
