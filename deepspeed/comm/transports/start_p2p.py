"""Starts P2P operations. If the connection is closed, returns a failed ``Work`` whose ``wait()`` raises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class FailedWork:
    """A transfer that could not begin, as the connection is gone. In the place of torch's ``Work``."""

    error: RuntimeError

    def wait(self, *_patience: Any) -> None:
        """Fails, where the watch finds out why."""
        raise self.error

    def is_completed(self) -> bool:
        """It is not."""
        return False


def start_p2p(transfer: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int) -> Any:
    """Starts a process group's ``send`` or ``recv``. If the connection is closed, returns work whose ``wait()`` raises.

    Args:
        transfer: The method.
        tensor: Contiguous, any shape.
        peer: The other rank in the group.
        tag: Of the transfer.
    """
    try:
        return transfer([tensor], peer, tag)
    except RuntimeError as error:
        return FailedWork(error)
