"""What this rank has promised to hand on: the second steps of gathers that go node by node (``comm.host.nodes``).

In such a gather a neighbour waits for what this rank receives from another node. It must not wait for ever while this
rank blocks in something else, so whatever may block until a peer does something catches up first, and a wait for one
gather first hands on what the gathers before it need. Later gathers are left alone there: a peer may issue them only
after something that it does together with this rank.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from deepspeed.comm.host.training_thread import TrainingThread


class Relay(Protocol):
    """Something to hand on."""

    @property
    def is_over(self) -> bool:
        """Whether nobody is there any more to hand it on to."""

    def hand_on(self) -> None:
        """Waits for what comes from other nodes and sends it to the neighbours."""


_owed: deque[Relay] = deque()
"""Of this process, all engines together, oldest first."""

_training = TrainingThread()


def owe(relay: Relay) -> None:
    """Adds a promise of the training thread."""
    _owed.append(relay)


def catch_up(last: Relay | None = None) -> None:
    """Keeps the promises in order, up to ``last``; None: all. Nothing is done beside training, which made them.

    Args:
        last: Where it is not owed (any more), nothing is done.
    """
    if _training.is_elsewhere() or (last is not None and last not in _owed):
        return
    while _owed:
        relay = _owed.popleft()
        if not relay.is_over:
            relay.hand_on()
        if relay is last:
            return
