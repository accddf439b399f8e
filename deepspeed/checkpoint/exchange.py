"""Runs actions on all ranks together: if one rank fails, all raise."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from deepspeed.checkpoint.restricted import PickledObject
from deepspeed.comm.base.encoding import decode, encode
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.transports.objects import gather_bytes
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import CheckpointError, DeepSpeedError

T = TypeVar("T")

_PATIENCE = timedelta(hours=12)  # for the slowest disk among the ranks; a rank that dies is detected immediately


class Exchange:
    """Small messages between the ranks that save or load together. Every rank must make one, in the same order."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.rank = transport.rank  # this rank in the group
        self.size = transport.size  # ranks in the group

    @classmethod
    def between(cls, axis: Axis) -> Exchange:
        """Returns an exchange with a transport of its own."""
        return cls(axis.objects(patience=_PATIENCE, why="checkpoints"))

    def gather(self, value: Any, doing: str) -> list[Any]:
        """Gathers ``value`` of all ranks, by rank; ``doing`` names the operation in timeout messages.

        Objects that only code can restore are gathered as :class:`PickledObject`, which no rank opens.
        """
        return [value] if self.size == 1 else self._gather(encode(value, PickledObject.of), doing)

    def _gather(self, mine: bytes, doing: str) -> list[Any]:
        return [decode(each) for each in gather_bytes(self._transport, mine, label=doing)]

    def together(self, doing: str, action: Callable[[], T]) -> list[T]:
        """Runs ``action``, which must not communicate, on every rank and gives every rank all results.

        Raises:
            CheckpointError: It failed on some rank; the same message on all of them.
        """
        failure: str | None = None
        cause: BaseException | None = None
        result: T | None = None
        mine = b""
        try:
            result = action()
            mine = b"" if self.size == 1 else encode((None, result), PickledObject.of)
        except Exception as error:  # any error must reach the other ranks, which would wait otherwise
            failure, cause = _describe(error), error
            mine = encode((failure, None))
        outcomes: list[Any] = [(failure, result)] if self.size == 1 else self._gather(mine, doing)
        failed = [(rank, text) for rank, (text, _) in enumerate(outcomes) if text is not None]
        if failed:
            raise CheckpointError(_report(doing, failed, self.size)) from cause
        return [value for _, value in outcomes]


def _describe(error: Exception) -> str:
    if isinstance(error, DeepSpeedError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}{_remedy(error)}"
    return f"{type(error).__name__}: {error}"


def _remedy(error: OSError) -> str:
    if error.errno == errno.EFBIG:
        return "; a limit on the size of files is in force: raise it (ulimit -f)"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "; make room, or save to another disk"
    return ""


def _report(doing: str, failed: list[tuple[int, str]], size: int) -> str:
    first_rank, first = failed[0]
    if size == 1:
        return f"{doing} failed: {first}"
    same = [str(rank) for rank, text in failed if text == first]
    text = f"{doing} failed on rank{'s' * (len(same) > 1)} {', '.join(same)}: {first}"
    others = [f"rank {rank}: {other}" for rank, other in failed if other != first]
    return "\n".join([text, *others[:8]])
