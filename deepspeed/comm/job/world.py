"""Short functions for the current job's number of ranks, the rank of this process and the backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deepspeed.comm.job.job import Job


def is_initialized() -> bool:
    """Returns whether the job has more than one rank."""
    return Job.current().ranks.is_initialized()


def rank_in(group: Any = None) -> int:
    """Returns this process's rank in ``group`` (None: among all)."""
    return Job.current().ranks.rank_in(group)


def size_of(group: Any = None) -> int:
    """Returns the number of ranks in ``group`` (None: of all)."""
    return Job.current().ranks.size_of(group)


def ranks_of(group: Any = None) -> list[int]:
    """Returns the numbers in the job of the members of ``group`` (None: all), in its order."""
    return Job.current().ranks.ranks_of(group)


def backend_of(group: Any = None) -> str:
    """Returns the backend of ``group``."""
    return Job.current().ranks.backend_of(group)


def define_group(
    name: str,
    ranks: Sequence[Sequence[int]],
    divisor: int | None = None,
    *,
    is_whole: bool = False,
    lasts: bool = True,
) -> None:
    """Declares a group for parameters that are not the same on all data-parallel ranks.

    Every rank of the job must call it alike; arguments and errors as in ``DeclaredGroups.define``.
    """
    Job.current().declared.define(name, ranks, divisor, is_whole=is_whole, lasts=lasts)
