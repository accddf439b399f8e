"""Posts of ranks for each other's watchdogs.

They are validated, as any process that reaches the store may write to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

from deepspeed.comm.base.batched_store import read_many, those_there
from deepspeed.logging import logger, printable

# Posts that a rank reads at once. If more ranks wait, a few read all posts and the others a part: if all read all,
# reads would grow with the square of the number of ranks.
MOST_READ = 64
_SAMPLE = 8  # posts that a rank reads of more members than that
_READ_ALL = 4  # ranks that read everything in one period, if all wait

_TYPES: dict[str, tuple[type, ...]] = {
    "check": (int,),
    "channel": (str,),
    "index": (int,),
    "members": (str,),
    "label": (str,),
    "on_stream": (bool,),
    "blocks_host": (bool,),
    "gives_up": (bool,),
    "issued": (dict,),
    "key": (int, type(None)),
    "has_left": (bool,),
}
# Keys of the post of a rank that waits, and of one whose program has ended.
_WAITING = {"check", "channel", "index", "members", "label", "issued"}
_LEFT = {"has_left", "issued"}


def read_post(text: str, size: int) -> dict[str, Any] | None:
    """Returns a rank's post, of a job of ``size`` ranks, with every value of the right type; None if it is no post."""
    try:
        post = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(post, dict) or not (post.keys() >= _WAITING or post.keys() >= _LEFT):
        return None
    if any(type(value) not in _TYPES.get(name, (type(value),)) for name, value in post.items()):
        return None
    if not all(type(count) is int for count in post["issued"].values()):
        return None
    if "members" not in post:
        return post
    members = members_from(post["members"], size)
    return None if members is None else {**post, "label": printable(post["label"]), "members": members}


def members_text(ranks: Sequence[int]) -> str:
    """Returns ranks as text for a post: runs of equal steps, ``first:last:step``, with commas between them.

    The members of a group along an axis of a mesh are one run or a few, however many ranks there are.
    """
    if len(ranks) > 1 and 0 <= ranks[0] < ranks[1]:
        one_run = range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])
        if len(one_run) == len(ranks) and tuple(one_run) == tuple(ranks):
            return f"{one_run.start}:{ranks[-1]}:{one_run.step}"
    runs: list[str] = []
    at = 0
    while at < len(ranks):
        end = at + 1
        step = ranks[end] - ranks[at] if end < len(ranks) else 1
        while end < len(ranks) and step > 0 and ranks[end] - ranks[end - 1] == step:
            end += 1
        runs.append(f"{ranks[at]}:{ranks[end - 1]}:{max(step, 1)}")
        at = end
    return ",".join(runs)


@lru_cache(maxsize=1024)
def members_from(text: str, size: int) -> tuple[int, ...] | None:
    """Returns the ranks that :func:`members_text` wrote, the same object for equal texts; None for another text."""
    ranks: list[int] = []
    try:
        for run in text.split(",") if text else ():
            first, last, step = map(int, run.split(":"))
            if not (0 <= first <= last < size and step > 0):
                return None
            ranks += range(first, last + 1, step)
            if len(ranks) > size:
                return None
    except ValueError:
        return None
    return tuple(ranks)


class PostReader:
    """Reads the posts of other ranks, under a ``key`` of each, in the store that all ranks of the job share."""

    def __init__(self, store: Any, key: Callable[[object], str], rank: int, size: int) -> None:
        self._store, self._key, self._rank, self._size = store, key, rank, size
        self._reads = 0
        self._has_warned = False

    def is_turn(self, check: int) -> bool:
        """Returns whether this rank reads all posts in period number ``check``."""
        return (check + self._rank) % max(-(-self._size // _READ_ALL), 1) == 0

    def read(self, members: Sequence[int], *, everything: bool) -> dict[int, dict[str, Any]]:
        """Returns the newest posts of the other ranks in ``members``, and of those that they wait for, and so on.

        Reads them all, or without ``everything`` up to :data:`MOST_READ`, or a few in rotation if there are more.
        """
        self._reads += 1
        if not everything and len(members) > MOST_READ + 1:
            return self.read_only(self._sample(members))
        found: dict[int, dict[str, Any]] = {}
        unread = set(members) - {self._rank}
        while unread:
            is_sample = not everything and len(unread) > MOST_READ - len(found)
            some = self._sample(sorted(unread)) if is_sample else sorted(unread)
            found |= self.read_only(some)
            # Equal members are one object, so that each is searched once for thousands of posts.
            further = {id(one): one for one in (found[rank].get("members", ()) for rank in some)}
            unread = set().union(*further.values()) - found.keys() - {self._rank}
            if is_sample:
                break
        return found

    def read_only(self, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Returns the newest posts of ``ranks``; empty ones for those that have posted nothing."""
        found: dict[int, dict[str, Any]] = {rank: {} for rank in sorted(ranks)}
        by_key = {self._key(rank): rank for rank in found}
        there = those_there(self._store, list(by_key))
        for key, text in zip(there, read_many(self._store, there), strict=True):
            found[by_key[key]] = self._parsed(by_key[key], text.decode())
        return found

    def _sample(self, ranks: Sequence[int]) -> list[int]:
        """Returns the next ``_SAMPLE`` of ``ranks`` in rotation, without this rank."""
        start = (self._rank + self._reads) * _SAMPLE
        some = (ranks[(start + place) % len(ranks)] for place in range(min(_SAMPLE + 1, len(ranks))))
        return [rank for rank in some if rank != self._rank][:_SAMPLE]

    def _parsed(self, rank: int, text: str) -> dict[str, Any]:
        """Returns a rank's newest post; empty if it is not in the format of this version."""
        post = read_post(text, self._size)
        if post is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"rank {self._rank}: the entry of rank {rank} in the rendezvous store cannot be read and is ignored. "
                "Check that all ranks have the same version, and that nothing else uses the master port"
            )
        return post or {}
