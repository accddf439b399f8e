"""The one place where this package makes process groups.

Torch wants every rank of the job to make every group, in one order: it names a group by a count, and groups of the same
name meet at the same keys. So nobody makes a group of its own ranks here: all make all groups of an axis, from one
list, and each takes its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from deepspeed.comm.device import unbound
from deepspeed.comm.meeting import meet
from deepspeed.comm.party import job_watch, party_of
from deepspeed.comm.store import is_alive
from deepspeed.comm.world import PlayedGroup, stand_in
from deepspeed.errors import CommunicationError

_TORCH_TIMEOUT = timedelta(minutes=30)  # torch's own for making a group

_made: list[tuple[Any, list[list[int]], str, Any]] = []
"""Groups that exist and are shared: ``(all ranks of their time, the members of all groups of the axis, why, this
rank's group)``.

Torch keeps groups, with their threads, until they are destroyed; so engines that come after each other share them. Of
those for transfers only gloo's can be shared: elsewhere two users would have to agree on the order of their transfers.
"""


def my_group(
    groups: Sequence[Sequence[int]],
    *,
    backend: str,
    timeout: timedelta | None,
    why: str,
    is_for_programs: bool = False,
) -> Any:
    """This rank's group of an axis. Every rank of the job must call it, in the same order, with the same list.

    Args:
        groups: The members of all groups of the axis; every rank of the job is in exactly one.
        backend: Of the groups. Gloo's are made once; others, see ``is_for_programs``.
        timeout: For their transfers; None: torch's.
        why: What they are for, in words, for whoever waits in vain; equal words are one purpose.
        is_for_programs: Nothing of this package travels in them, and programs order their own collectives; so they are
            made once whatever their backend.

    Raises:
        DivergenceError: Some rank does something else.
        CommunicationError: Some rank has ended or did not come.
    """
    axis = [sorted(ranks) for ranks in groups]
    if (others := stand_in()) is not None:
        return PlayedGroup(tuple(next(ranks for ranks in axis if others.rank in ranks)))
    world = dist.group.WORLD
    is_shared = is_for_programs or backend == "gloo"
    if is_shared:
        _made[:] = [entry for entry in _made if entry[0] is world and is_alive(entry[3])]
        known = next((group for _, members, use, group in _made if members == axis and use == why), None)
        if known is not None:
            return known
    meet_to_make(f"the making of process groups {_shown(axis)} for {why}", timeout)
    with unbound():
        made = [dist.new_group(ranks, backend=backend, timeout=timeout) for ranks in axis]
    mine = next(group for group, ranks in zip(made, axis, strict=True) if dist.get_rank() in ranks)
    if is_shared:
        _made.append((world, axis, why, mine))
    return mine


def group_alone() -> Any:
    """A group of this rank alone. Other ranks need not call it."""
    if (others := stand_in()) is not None:
        return PlayedGroup((others.rank,))
    if dist.get_world_size() == 1:
        return dist.group.WORLD
    with unbound():
        return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def groups_beside(group: Any, timeout: timedelta | None) -> list[list[int]]:
    """The members of ``group`` and of the groups of the other ranks. Every rank of the job must call it.

    Each rank knows its own group only; they tell each other at the store.

    Args:
        group: This rank's; together they are all ranks, each once.
        timeout: How long to wait for the other ranks; None: as torch.

    Raises:
        CommunicationError: They are not; the same on every rank.
        DivergenceError: Some rank does something else.
    """
    size = dist.get_world_size()
    ranks = sorted(dist.get_process_group_ranks(group))
    if len(ranks) == size:
        return [ranks]
    mine = f"{ranks[0]} {zlib.crc32(repr(ranks).encode())}"
    label = "the exchange of the members of process groups"
    words = meet(job_watch(), label, range(size), timeout or _TORCH_TIMEOUT, mine)
    found: dict[str, list[int]] = {}
    for rank, word in enumerate(words):
        found.setdefault(word, []).append(rank)
    for word, members in found.items():
        if word != f"{members[0]} {zlib.crc32(repr(members).encode())}":
            raise CommunicationError(
                f"process groups that the ranks use side by side must hold every rank once: rank {members[0]} gave a "
                f"group that is not that of the other ranks in it (the ranks {', '.join(map(str, members))} gave equal "
                "ones). Check the groups that the mpu answers"
            )
    return list(found.values())


def meet_to_make(label: str, timeout: timedelta | None, members: Sequence[int] | None = None) -> None:
    """Meets the ``members`` (None: all ranks of the job) before a call of torch that makes groups with them."""
    party = party_of()
    if party is not None and (members is None or len(members) > 1):
        ranks = party.ranks if members is None else tuple(members)
        meet(party.watch, label, ranks, timeout or _TORCH_TIMEOUT)


def _shown(axis: list[list[int]]) -> str:
    text = str(axis)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(axis)} groups, {zlib.crc32(text.encode()):08x})"
