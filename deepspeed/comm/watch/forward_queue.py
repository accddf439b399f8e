"""Queues data that this rank must forward: the second steps of gathers between and within nodes (``comm.host.nodes``).

In such a gather a neighbor waits for data that this rank receives from another node. So that the neighbor does not
wait forever, code that may block until a peer acts forwards first, and a wait for one gather first forwards the data of
earlier gathers. It leaves later gathers alone: a peer may issue them only after an operation with this rank.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol


class ForwardRequest(Protocol):
    """Data to forward."""

    def hand_on(self) -> None:
        """Waits for the data from other nodes and sends it to the neighbors."""


class ForwardQueue:
    """The pending requests of one rank, of all engines of the job, oldest first."""

    def __init__(self) -> None:
        self._pending: deque[ForwardRequest] = deque()
        self._training = TrainingThread()

    def add(self, request: ForwardRequest) -> None:
        """Adds a transfer to forward; called by the training thread."""
        self._training.is_elsewhere()  # records which thread is the training thread
        self._pending.append(request)

    def progress_pending(self, last: ForwardRequest | None = None) -> None:
        """Forwards pending requests in order, up to ``last``; None: all. Does nothing outside the training thread.

        Nor if ``last`` is not (or no longer) in the queue.
        """
        if not self._pending or self._training.is_elsewhere() or (last is not None and last not in self._pending):
            return
        while self._pending:
            request = self._pending.popleft()
            request.hand_on()
            if request is last:
                return

    def clear(self) -> None:
        """Drops all requests when the job is over."""
        self._pending.clear()


class TrainingThread:
    """The training thread: the first thread that calls :meth:`is_elsewhere`.

    Autograd's threads, which run hooks while the training thread waits for the backward, count as the training thread.
    """

    def __init__(self) -> None:
        self._ident: int | None = None

    def is_elsewhere(self) -> bool:
        """Returns whether the calling thread is another one than the training thread."""
        me = threading.get_ident()
        if self._ident is None:
            self._ident = me
        if me == self._ident:
            return False
        own = {thread.ident for thread in threading.enumerate() if not thread.name.startswith("Dummy-")}
        if self._ident not in own:
            self._ident = me
        return me != self._ident and me in own
