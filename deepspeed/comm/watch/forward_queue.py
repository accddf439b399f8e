"""Keeps what this rank has promised to hand on: the second steps of gathers that go node by node (``comm.host.nodes``).

In such a gather a neighbour waits for what this rank receives from another node. It must not wait for ever while this
rank blocks in something else, so code that may block until a peer acts forwards first, and a wait for one
gather first hands on what the gathers before it need. Later gathers are left alone there: a peer may issue them only
after something that it does together with this rank.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol


class ForwardRequest(Protocol):
    """Something to hand on."""

    def hand_on(self) -> None:
        """Waits for what comes from other nodes and sends it to the neighbours."""


class ForwardQueue:
    """The promises of one rank in a job, of all engines together, oldest first."""

    def __init__(self) -> None:
        self._pending: deque[ForwardRequest] = deque()
        self._training = TrainingThread()

    def add(self, request: ForwardRequest) -> None:
        """Adds a transfer to forward; called by the training thread."""
        self._training.is_elsewhere()  # so that it is known which one that is
        self._pending.append(request)

    def progress_pending(self, last: ForwardRequest | None = None) -> None:
        """Keeps the promises in order, up to ``last``; None: all. Does nothing in other threads than the training one.

        Args:
            last: If it is not in the queue (any more), nothing is done.
        """
        if not self._pending or self._training.is_elsewhere() or (last is not None and last not in self._pending):
            return
        while self._pending:
            request = self._pending.popleft()
            request.hand_on()
            if request is last:
                return

    def clear(self) -> None:
        """Drops all promises: the job is over."""
        self._pending.clear()


class TrainingThread:
    """The first thread that asked whether it is the one.

    Torch's own threads, which run hooks while the training thread waits for the end of a backward, count as that one.
    """

    def __init__(self) -> None:
        self._ident: int | None = None

    def is_elsewhere(self) -> bool:
        """Returns whether the calling thread works beside the one that trains."""
        me = threading.get_ident()
        if self._ident is None:
            self._ident = me
        if me == self._ident:
            return False
        own = {thread.ident for thread in threading.enumerate() if not thread.name.startswith("Dummy-")}
        if self._ident not in own:
            self._ident = me
        return me != self._ident and me in own
