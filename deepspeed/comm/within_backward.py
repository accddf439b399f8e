"""Whether layers of this job talk to other ranks in the middle of a backward.

A rank that waits there for the reduction of a bucket may wait for one that needs an exchange with it first: a peer
holds a bucket back in which it has unused parameters until its backward is over. So while layers talk, nobody waits for
a reduction before its own backward is over. Layers say so when they run; it holds from then on, in this job: what
happens on ranks that are only played, or happened before another job began in this process, says nothing about it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from deepspeed.comm.world import World, stand_in


@dataclass
class _Said:
    talks: bool = False
    is_uneven: bool = False


_in_job: tuple[Any, _Said] = None, _Said()  # with the group of all ranks: another one is another job
_played: weakref.WeakKeyDictionary[World, _Said] = weakref.WeakKeyDictionary()


def note(*, uneven: bool = False) -> None:
    """A layer will talk in its backward.

    Args:
        uneven: Which of its parameters get a gradient may differ between the ranks.
    """
    said = _said()
    said.talks = True
    said.is_uneven = said.is_uneven or uneven


def layers_talk() -> bool:
    """Whether any layer does; equal on all ranks."""
    return _said().talks


def is_uneven() -> bool:
    """Whether one of them has gradients on some ranks only."""
    return _said().is_uneven


def _said() -> _Said:
    global _in_job
    played = stand_in()
    if played is not None:
        return _played.setdefault(played, _Said())
    everyone = dist.group.WORLD
    if _in_job[0] is not everyone:
        _in_job = everyone, _Said()
    return _in_job[1]
