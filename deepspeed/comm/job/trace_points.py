"""Records how far a rank is in layers that call torch's own collectives, so that the watch detects diverged ranks.

Such layers start their transfers inside torch (``DTensor``), and wait where a result is first used, so their waits
cannot be supervised. Instead a rank posts which layer or backward it has reached: from there on it may wait until the
other ranks reach the same place.
"""

from __future__ import annotations

import functools
import time
import zlib
from typing import Any

import torch

from deepspeed.comm.job.job import Job
from deepspeed.comm.watch.wait_records import WaitRecord
from deepspeed.errors import DeepSpeedError


class TracePoints:
    """The trace points of one model, which all ranks of the group whose collectives layers call pass in one order."""

    def __init__(self, group: Any) -> None:
        self._group = group
        Job.current().watched.of(group)  # so that the watch can end the group's waits

    def __deepcopy__(self, memo: Any) -> TracePoints:
        return self  # a copied model communicates with the same ranks

    def reach(self, name: str) -> None:
        """Records that this rank has reached ``name``."""
        if torch.compiler.is_compiling():
            return
        watched = Job.current().watched.of(self._group)
        if watched is None or not watched.waits_on_host:
            return
        channel, index = watched.issue("trace point", _key(name))
        watched.watch.note_position(
            WaitRecord(channel, index, watched.ranks, f"the others at {name}", time.monotonic())
        )


def reason_of(error: RuntimeError) -> Exception | None:
    """Returns why a forward or backward failed, if the cause is that other ranks diverged or ended."""
    return None if isinstance(error, DeepSpeedError) else Job.current().watched.known_reason()


@functools.cache
def _key(name: str) -> int:
    return zlib.crc32(name.encode())
