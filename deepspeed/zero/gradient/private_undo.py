"""What an update has done to a rank's private state can be taken back, so that a skipped one leaves it as it was.

Reductions run while it is not known yet whether a gradient of this update overflows, here or on another rank: only the
agreement before the update tells. So the state is kept as it was before the first of them.
"""

from __future__ import annotations

from deepspeed.zero.storage import FlatBuffer, Kind, Ledger


class PrivateUndo:
    """The private state of one bucket as it was before the update that is under way.

    Args:
        private: The state.
        ledger: Books of the memory, as much again.
    """

    def __init__(self, private: FlatBuffer, ledger: Ledger) -> None:
        self._private = private.tensor
        numel, dtype, device = private.tensor.numel(), private.tensor.dtype, private.tensor.device
        self._before = FlatBuffer(numel, dtype, device, kind=Kind.PRIVATE, ledger=ledger)
        self._is_kept = False

    def keep(self) -> None:
        """A reduction is about to change the state; only the first one of an update counts."""
        if not self._is_kept:
            self._before.tensor.copy_(self._private)
            self._is_kept = True

    def scale(self, factor: float) -> None:
        """The unit of the state changes."""
        if self._is_kept:
            self._before.tensor.mul_(factor)

    def commit(self) -> None:
        """The update is applied: what it has done stays."""
        self._is_kept = False

    def take_back(self) -> None:
        """The gradients of the update are thrown away: the state is what it was. After a commit, nothing."""
        if self._is_kept:
            self._private.copy_(self._before.tensor)
            self._is_kept = False
