"""The one place where this package makes process groups.

Torch wants every rank of the job to make every group, in one order: it names a group by a count, and groups of the same
name meet at the same keys. So nobody makes a group of its own ranks here: all make all groups of an axis, from one
list, and each takes its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed.comm.job.ranks import Ranks
from deepspeed.comm.start.barrier import agree, meet
from deepspeed.comm.start.device import unbound
from deepspeed.comm.watch.watched_group import WatchedGroups
from deepspeed.errors import CommunicationError

_TORCH_TIMEOUT = timedelta(minutes=30)  # torch's own for making a group


@dataclass(eq=False)
class _Made:
    """A process group that exists and is used again.

    Torch keeps groups, with their threads and buffers, until they are destroyed; so engines that come after each other
    use the same ones. Of those for transfers only gloo's serve several users at once: elsewhere these would have to
    agree on the order of their transfers. See "Communicators go from one engine to the next" in docs/design/zero.md.

    Attributes:
        axis: The members of all groups of the axis.
        use: What it is for, in words.
        options: Backend and time limit.
        group: This rank's group.
        number: Counts the groups of a job that have one user at a time; equal on all ranks for one call.
        is_shared: Whether it may have several users at once.
        is_free: Whether it has one user at a time, and now none.
    """

    axis: list[list[int]]
    use: str
    options: tuple[str, timedelta | None]
    group: Any
    number: int = 0
    is_shared: bool = False
    is_free: bool = False


class Lease:
    """The process groups that an engine has for itself until it gives them back."""

    def __init__(self) -> None:
        self._entries: list[_Made] = []

    def take(self, entries: Sequence[_Made]) -> None:
        """Adds groups."""
        self._entries.extend(entries)

    def give_back(self) -> None:
        """Lets the next engine have the groups. No rank waits for another one; later calls do nothing."""
        for entry in self._entries:
            entry.is_free = True
        self._entries.clear()


class ProcessGroups:
    """The process groups that a job makes.

    Args:
        ranks: Of the job.
        watched: Its groups in use; a group that is destroyed is forgotten there.
    """

    def __init__(self, ranks: Ranks, watched: WatchedGroups) -> None:
        self._ranks = ranks
        self._watched = watched
        self._alone: Any = None

    @contextmanager
    def leased(self) -> Iterator[Lease]:
        """Yields a lease which at the end of the block has the groups that :meth:`mine` returned in it for one user.

        After an error in the block they are free.
        """
        lease, before = Lease(), {entry for entry in self._made() if not entry.is_free}
        try:
            yield lease
        except BaseException:
            lease.take(self._taken_since(before))
            lease.give_back()
            raise
        lease.take(self._taken_since(before))

    def _made(self) -> list[_Made]:
        return [record.made for record in self._watched.records() if record.made is not None]

    def _taken_since(self, before: set[_Made]) -> list[_Made]:
        return [one for one in self._made() if not one.is_shared and not one.is_free and one not in before]

    def mine(
        self,
        groups: Sequence[Sequence[int]],
        *,
        backend: str,
        timeout: timedelta | None,
        why: str,
        is_for_programs: bool = False,
    ) -> Any:
        """Returns this rank's group of an axis. Every rank of the job must call it, in one order, with the same list.

        Args:
            groups: The members of all groups of the axis; every rank of the job is in exactly one.
            backend: Of the groups. Gloo's are made once; others have one user at a time, so that they are made unless
                all ranks have equal ones that an earlier user gave back (:class:`Lease`); see also ``is_for_programs``.
            timeout: For their transfers; None: torch's.
            why: What they are for, in words, for whoever waits in vain; equal words are one purpose.
            is_for_programs: Nothing of this package travels in them, and programs order their own collectives; so they
                are made once whatever their backend.

        Raises:
            DivergenceError: Some rank does something else.
            CommunicationError: Some rank has ended or did not come.
        """
        axis = [sorted(ranks) for ranks in groups]
        is_shared = is_for_programs or backend == "gloo"
        equal = [one for one in self._made() if one.is_shared == is_shared and one.axis == axis and one.use == why]
        label = f"the making of process groups {_shown(axis)} for {why}"
        options = (backend, timeout)
        if is_shared:
            if equal:
                return equal[0].group
            self.meet(label, timeout)
        else:
            free = [entry for entry in equal if entry.is_free and entry.options == options]
            entry = self._free_everywhere(free, axis, label, timeout or _TORCH_TIMEOUT)
            if entry is not None:
                entry.is_free = False
                return entry.group
        with unbound():
            made = [dist.new_group(ranks, backend=backend, timeout=timeout) for ranks in axis]
        group = next(group for group, ranks in zip(made, axis, strict=True) if dist.get_rank() in ranks)
        number = 0 if is_shared else self._watched.watch.issue("process groups for one user at a time")
        self._watched.record_of(group).made = _Made(axis, why, options, group, number, is_shared)
        return group

    def _free_everywhere(
        self, free: Sequence[_Made], axis: list[list[int]], label: str, timeout: timedelta
    ) -> _Made | None:
        """Returns the first of the groups that is free on all ranks of the job; None where none is: alike on all ranks.

        Ranks need not destroy engines at the same time, and after an error some may have issued a collective that
        others have not: the next one would be taken for it. So the members of a group must have issued equally many, on
        each channel.

        Args:
            free: The groups that are free on this rank, oldest first.
            axis: Their members.
            label: What the ranks are about to do, in words.
            timeout: How long to wait for the other ranks.
        """
        watched = self._watched.of()
        if watched is None:
            return next(iter(free), None)
        members = next(ranks for ranks in axis if watched.watch.rank in ranks)
        by_number = {str(entry.number): entry for entry in free}
        offers = [f"{number} {self._issued_over(entry.group)}" for number, entry in by_number.items()]
        numbers = [offer.split()[0] for offer in agree(watched.watch, label, members, timeout, offers)]
        if len(axis) > 1:
            numbers = agree(watched.watch, f"{label}, all of them", watched.ranks, timeout, numbers)
        return by_number[numbers[0]] if numbers else None

    def _issued_over(self, group: Any) -> int:
        """Returns a checksum, equal on all members that have issued the same over ``group``."""
        watched = self._watched.of(group)
        if watched is None:
            return 0
        return zlib.crc32(repr(sorted(watched.watch.issued_over(watched.scope).items())).encode())

    def alone(self) -> Any:
        """Returns the group of this rank alone, made at the first call. Other ranks need not call it."""
        if self._alone is None:
            self._alone = self._make_alone()
        return self._alone

    def _make_alone(self) -> Any:
        if dist.get_world_size() == 1:
            return dist.group.WORLD
        with unbound():
            return dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def beside(self, group: Any, timeout: timedelta | None) -> list[list[int]]:
        """Returns the members of ``group`` and of the groups of the other ranks. Every rank of the job must call it.

        Each rank knows its own group only; they tell each other at the store.

        Args:
            group: This rank's; together they are all ranks, each once.
            timeout: How long to wait for the other ranks; None: as torch.

        Raises:
            CommunicationError: They are not; the same on every rank.
            DivergenceError: Some rank does something else.
        """
        size = self._ranks.size_of()
        ranks = sorted(self._ranks.ranks_of(group))
        if len(ranks) == size:
            return [ranks]
        mine = f"{ranks[0]} {zlib.crc32(repr(ranks).encode())}"
        label = "the exchange of the members of process groups"
        words = meet(self._watched.watch, label, range(size), timeout or _TORCH_TIMEOUT, mine)
        found: dict[str, list[int]] = {}
        for rank, word in enumerate(words):
            found.setdefault(word, []).append(rank)
        for word, members in found.items():
            if word != f"{members[0]} {zlib.crc32(repr(members).encode())}":
                raise CommunicationError(
                    f"process groups that the ranks use side by side must hold every rank once: rank {members[0]} gave "
                    f"a group that is not that of the other ranks in it (the ranks {', '.join(map(str, members))} gave "
                    "equal ones). Check the groups that the mpu answers"
                )
        return list(found.values())

    def meet(self, label: str, timeout: timedelta | None, members: Sequence[int] | None = None) -> None:
        """Meets the ``members`` (None: all ranks of the job) before a call of torch that makes groups with them."""
        watched = self._watched.of()
        if watched is not None and (members is None or len(members) > 1):
            ranks = watched.ranks if members is None else tuple(members)
            meet(watched.watch, label, ranks, timeout or _TORCH_TIMEOUT)


def _shown(axis: list[list[int]]) -> str:
    text = str(axis)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(axis)} groups, {zlib.crc32(text.encode()):08x})"
