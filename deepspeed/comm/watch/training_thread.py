"""Which thread trains. Another one (a checkpoint that is written beside training) holds up no rank by its waits."""

from __future__ import annotations

import threading


class TrainingThread:
    """The first thread that asked whether it is the one.

    Torch's own threads, which run hooks while the training thread waits for the end of a backward, count as that one.
    """

    def __init__(self) -> None:
        self._ident: int | None = None

    def is_elsewhere(self) -> bool:
        """Whether the calling thread works beside the one that trains."""
        me = threading.get_ident()
        if self._ident is None:
            self._ident = me
        if me == self._ident:
            return False
        own = {thread.ident for thread in threading.enumerate() if not thread.name.startswith("Dummy-")}
        if self._ident not in own:
            self._ident = me
        return me != self._ident and me in own
