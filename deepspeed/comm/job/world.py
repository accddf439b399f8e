"""Who takes part: torch's process groups, or a stand-in for all the other ranks.

The functions of this package that ask "how many are we, which one am I, how do we talk" ask here. A stand-in answers
for ranks that do not exist, so that one process can go through the motions of rank *r* of *N*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist


@dataclass(frozen=True)
class PlayedGroup:
    """A process group of ranks that do not exist.

    Attributes:
        ranks: Their numbers in the job, ascending.
    """

    ranks: tuple[int, ...]


class World(Protocol):
    """What a stand-in must know.

    Attributes:
        rank: The rank that this process plays.
        size: Number of ranks.
        backend: Name of the backend that is played.
        operations: Has the collectives of ``torch.distributed`` that are played, under their names.
    """

    rank: int
    size: int
    backend: str
    operations: Any

    def transport(self, device: torch.device | None, ranks: Sequence[int] | None = None) -> Any:
        """Returns a ``Transport`` for buffers on ``device`` between ``ranks`` (None: all)."""


_stand_in: World | None = None


def stand_in() -> World | None:
    """The stand-in, or None where torch's process groups count."""
    return _stand_in


def operations() -> Any:
    """What has the collectives: ``torch.distributed``, or the stand-in for it."""
    return torch_dist if _stand_in is None else _stand_in.operations


@contextmanager
def played_by(world: World) -> Iterator[None]:
    """Inside, ``world`` answers in place of torch's process groups. For one thread of one process."""
    global _stand_in
    before, _stand_in = _stand_in, world
    try:
        yield
    finally:
        _stand_in = before


def is_initialized() -> bool:
    """Whether there are ranks to talk to."""
    return _stand_in is not None or torch_dist.is_initialized()


def rank_in(group: Any = None) -> int:
    """This process's rank in ``group`` (None: among all)."""
    if _stand_in is None:
        return torch_dist.get_rank(group)
    return group.ranks.index(_stand_in.rank) if isinstance(group, PlayedGroup) else _stand_in.rank


def size_of(group: Any = None) -> int:
    """The number of ranks in ``group`` (None: of all)."""
    if _stand_in is None:
        return torch_dist.get_world_size(group)
    return len(group.ranks) if isinstance(group, PlayedGroup) else _stand_in.size


def ranks_of(group: Any = None) -> list[int]:
    """The numbers in the job of the members of ``group`` (None: all), in its order."""
    if isinstance(group, PlayedGroup):
        return list(group.ranks)
    return list(range(size_of())) if group is None else torch_dist.get_process_group_ranks(group)


def this_job() -> Any:
    """Something that is another object in another job; None where there is none."""
    return _stand_in or (torch_dist.group.WORLD if torch_dist.is_initialized() else None)


def backend_of(group: Any = None) -> str:
    """The backend of ``group``."""
    return _stand_in.backend if _stand_in is not None else torch_dist.get_backend(group)
