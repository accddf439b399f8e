"""Ranks that act together: what one of them cannot do, none of them believes done."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from deepspeed import comm
from deepspeed.errors import CheckpointError, DeepSpeedError

T = TypeVar("T")

_PATIENCE = timedelta(hours=12)  # for the slowest disk among the ranks; a rank that dies is noticed at once


class Exchange:
    """Small messages between the ranks that save or load together.

    Args:
        group: Their process group; None for all ranks.

    Attributes:
        rank: This rank in the group.
        size: Ranks in the group.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self._owns_group = False
        self.rank = comm.get_rank(group) if comm.is_initialized() else 0
        self.size = comm.get_world_size(group) if comm.is_initialized() else 1

    def side_channel(self) -> Exchange:
        """The same ranks over a group of their own, for messages from another thread. Every rank must call it."""
        if self.size == 1:
            return self
        ranks = comm.get_all_ranks_from_group(self.group if self.group is not None else comm.get_world_group())
        is_everybody = len(ranks) == comm.get_world_size()
        group = comm.new_group(ranks, backend="gloo", timeout=_PATIENCE, use_local_synchronization=not is_everybody)
        made = Exchange(group)
        # Torch names locally synchronised groups by their ranks: a second one of that name would meet in the remains of
        # the first, so those are kept for good.
        made._owns_group = is_everybody
        return made

    def close(self) -> None:
        """Ends a group that :meth:`side_channel` made; torch keeps groups, with their threads, until then."""
        if self._owns_group and comm.is_initialized():
            comm.destroy_process_group(self.group)
        self._owns_group = False

    def gather(self, value: Any) -> list[Any]:
        """Everybody's ``value``, by rank."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        comm.all_gather_object(gathered, value, group=self.group)
        return gathered

    def together(self, doing: str, action: Callable[[], T]) -> list[T]:
        """Runs ``action`` on every rank and gives everybody all results.

        Args:
            doing: What is being done, as "... failed" continues it.
            action: This rank's part. It must not communicate.

        Raises:
            CheckpointError: It failed on some rank; the same message on all of them.
        """
        failure: str | None = None
        cause: BaseException | None = None
        result: T | None = None
        try:
            result = action()
        except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
            failure, cause = _tell(error), error
        outcomes = self.gather((failure, result))
        failed = [(rank, text) for rank, (text, _) in enumerate(outcomes) if text is not None]
        if failed:
            raise CheckpointError(_report(doing, failed, self.size)) from cause
        return [value for _, value in outcomes]


def _tell(error: Exception) -> str:
    if isinstance(error, DeepSpeedError):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}{_remedy(error)}"
    return f"{type(error).__name__}: {error}"


def _remedy(error: OSError) -> str:
    """What to change where a disk refuses to take more."""
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
