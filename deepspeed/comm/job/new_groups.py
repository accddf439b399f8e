"""Makes all process groups of this package, each with one owner.

Torch wants every rank of the job to make every group, in one order: it names a group by a count, and groups of the same
name meet at the same keys. So no rank makes only its own group here: all make all groups of an axis, from one
list, and each takes its own. Who may use a group that exists, and when, follows from its :data:`Owner`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from deepspeed.comm.base.device import unbound
from deepspeed.comm.base.probes import probed_connections
from deepspeed.comm.base.ranks import Ranks
from deepspeed.comm.watch.barrier import agree, store_barrier
from deepspeed.comm.watch.watched_group import WatchedGroups
from deepspeed.errors import CallOrderError, CommunicationError

_TORCH_TIMEOUT = timedelta(minutes=30)  # torch's time limit for making a group

Owner = Literal["engine", "job", "program"]
"""Who owns a process group of a backend in which the order of transfers matters (not gloo).

- "engine": the open :class:`Lease`. Transfers may be delayed until the end of a backward pass, so two users could not
  keep one order. The group has one user at a time; the next one gets it when the lease ends.
- "job": every transfer is a call of the program, or its mirror in a backward pass, and all ranks of the group make
  these calls in one order. All users share it, also at the same time.
- "program": nothing of this package is sent in it, and programs order their own collectives. It is made once.
"""


@dataclass(eq=False)
class _CachedGroup:
    """A process group that is kept for reuse.

    Torch keeps groups, with their threads and buffers, until they are destroyed; so requests for equal groups share
    one. See "A communicator has one owner" in docs/design/zero.md.
    """

    axis: list[list[int]]  # the members of all groups of the axis
    use: str  # what it is for, in words
    options: tuple[str, timedelta | None]  # backend and time limit
    group: Any  # this rank's group
    owner: Owner  # see :data:`Owner`; gloo's are the program's, as several users may use them in any order
    # counts the groups of a job in which the order of transfers matters; equal on all ranks for one call
    number: int = 0
    is_free: bool = False  # whether it is for engines, and no engine uses it now


class Lease:
    """The process groups that one engine uses exclusively until :meth:`give_back`."""

    def __init__(self) -> None:
        self._entries: list[_CachedGroup] = []

    def take(self, entry: _CachedGroup) -> None:
        """Adds a group and marks it as in use."""
        entry.is_free = False
        self._entries.append(entry)

    def give_back(self) -> None:
        """Frees the groups for the next engine. Does not communicate; later calls do nothing."""
        for entry in self._entries:
            entry.is_free = True
        self._entries.clear()


class ProcessGroups:
    """The process groups that a job makes. A group that is destroyed is forgotten in ``watched``."""

    def __init__(self, ranks: Ranks, watched: WatchedGroups) -> None:
        self._ranks = ranks
        self._watched = watched
        self._alone: Any = None
        self._open: Lease | None = None

    @contextmanager
    def leased(self) -> Iterator[Lease]:
        """Yields the lease that owns what :meth:`mine` returns in the block for an engine.

        After an error in the block these groups are free.
        """
        outer, self._open = self._open, Lease()
        lease = self._open
        try:
            yield lease
        except BaseException:
            lease.give_back()
            raise
        finally:
            self._open = outer

    def _made(self) -> list[_CachedGroup]:
        return [record.made for record in self._watched.records() if record.made is not None]

    def mine(
        self,
        groups: Sequence[Sequence[int]],
        *,
        backend: str,
        timeout: timedelta | None,
        why: str,
        owner: Owner = "engine",
    ) -> Any:
        """Returns this rank's group of an axis. Every rank of the job must call it, in one order, with the same list.

        Args:
            groups: The members of all groups of the axis; every rank of the job is in exactly one.
            backend: The backend of the groups. Gloo's are made once, whatever their owner.
            timeout: For their transfers; None: torch's.
            why: What they are for, in words, shown if a rank waits in vain; equal words are one purpose.
            owner: The owner of groups of other backends. Those of an engine or the job are made unless all ranks have
                equal ones that may be used.

        Raises:
            CallOrderError: ``owner`` is "engine", and no lease is open.
            DivergenceError: Some rank does something else.
            CommunicationError: Some rank has ended or did not arrive.
        """
        axis = [sorted(ranks) for ranks in groups]
        owner = "program" if backend == "gloo" else owner
        equal = [one for one in self._made() if one.owner == owner and one.axis == axis and one.use == why]
        label = f"the making of process groups {_shown(axis)} for {why}"
        if owner == "program":
            if equal:
                return equal[0].group
            self.barrier(label, timeout)
            return self._make(_CachedGroup(axis, why, (backend, timeout), None, owner))
        lease = self._open
        if owner == "engine" and lease is None:
            raise CallOrderError(f"{label}: expected an open lease, which owns them. Call it inside leased()")
        usable = [one for one in equal if (one.is_free or owner == "job") and one.options == (backend, timeout)]
        entry = self._usable_everywhere(usable, axis, label, timeout or _TORCH_TIMEOUT)
        if entry is None:
            number = self._watched.watch.issue("process groups of transfers in one order")
            entry = _CachedGroup(axis, why, (backend, timeout), None, owner, number)
            self._make(entry)
        if owner == "engine":
            assert lease is not None
            lease.take(entry)
        return entry.group

    def _make(self, entry: _CachedGroup) -> Any:
        """Makes the groups of an axis, notes this rank's in ``entry`` and returns it."""
        backend, timeout = entry.options
        with unbound(), probed_connections():
            made = [dist.new_group(ranks, backend=backend, timeout=timeout) for ranks in entry.axis]
        entry.group = next(group for group, ranks in zip(made, entry.axis, strict=True) if dist.get_rank() in ranks)
        self._watched.record_of(entry.group).made = entry
        return entry.group

    def _usable_everywhere(
        self, usable: Sequence[_CachedGroup], axis: list[list[int]], label: str, timeout: timedelta
    ) -> _CachedGroup | None:
        """Returns the first group that all ranks of the job may use; None where there is none: alike on all ranks.

        Ranks need not destroy engines at the same time, and after an error some may have issued a collective that
        others have not: the next one would be taken for it. So the members of a group must have issued equally many, on
        each channel, and no row of transfers between some of them may have failed (``WatchedGroup.row``).
        """
        watched = self._watched.of()
        if watched is None:
            return next(iter(usable), None)
        members = next(ranks for ranks in axis if watched.watch.rank in ranks)
        by_number: dict[str, _CachedGroup] = {}
        offers = []
        for entry in usable:
            group = self._watched.of(entry.group)
            if group is not None and group.open_rows > 0:
                continue
            issued = (
                0 if group is None else zlib.crc32(repr(sorted(group.watch.issued_over(group.scope).items())).encode())
            )
            by_number[str(entry.number)] = entry
            offers.append(f"{entry.number} {issued}")
        numbers = [offer.split()[0] for offer in agree(watched.watch, label, members, timeout, offers)]
        if len(axis) > 1:
            numbers = agree(watched.watch, f"{label}, all of them", watched.ranks, timeout, numbers)
        return by_number[numbers[0]] if numbers else None

    def alone(self) -> Any:
        """Returns the group of this rank alone, made at the first call. Other ranks need not call it."""
        if self._alone is None and dist.get_world_size() == 1:
            self._alone = dist.group.WORLD
        elif self._alone is None:
            with unbound(), probed_connections():
                self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return self._alone

    def beside(self, group: Any, timeout: timedelta | None) -> list[list[int]]:
        """Returns the members of ``group`` and of the groups of the other ranks. Every rank of the job must call it.

        Each rank has the members of its own group only; the ranks exchange them through the store.

        Raises:
            CommunicationError: The groups are not disjoint or do not cover all ranks; the same on every rank.
            DivergenceError: Some rank does something else.
        """
        size = self._ranks.size_of()
        ranks = sorted(self._ranks.ranks_of(group))
        if len(ranks) == size:
            return [ranks]
        mine = f"{ranks[0]} {zlib.crc32(repr(ranks).encode())}"
        label = "the exchange of the members of process groups"
        words = store_barrier(self._watched.watch, label, range(size), timeout or _TORCH_TIMEOUT, mine)
        found: dict[str, list[int]] = {}
        for rank, word in enumerate(words):
            found.setdefault(word, []).append(rank)
        for word, members in found.items():
            if word != f"{members[0]} {zlib.crc32(repr(members).encode())}":
                raise CommunicationError(
                    "process groups that are used side by side must hold every rank once: the group of rank "
                    f"{members[0]} differs from that of other ranks in it (the ranks {', '.join(map(str, members))} "
                    "have equal groups). Check the groups that the mpu returns"
                )
        return list(found.values())

    def barrier(self, label: str, timeout: timedelta | None, members: Sequence[int] | None = None) -> None:
        """Waits for the ``members`` (None: all ranks of the job) before a call of torch that makes groups with them."""
        watched = self._watched.of()
        if watched is not None and (members is None or len(members) > 1):
            ranks = watched.ranks if members is None else tuple(members)
            store_barrier(watched.watch, label, ranks, timeout or _TORCH_TIMEOUT)


def _shown(axis: list[list[int]]) -> str:
    text = str(axis)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(axis)} groups, {zlib.crc32(text.encode()):08x})"
