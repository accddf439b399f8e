"""The job's one watch, and how each process group takes part in it.

Ranks are numbered as the job numbers them, whatever the group: so a circle of waits is found though it goes through
several groups, and messages name ranks as the launcher does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.host.drain_at_exit import rest_at_exit
from deepspeed.comm.host.message_queue import Mail
from deepspeed.comm.job.torch_groups import backend_for, is_alive, rendezvous_store
from deepspeed.comm.job.world import stand_in
from deepspeed.comm.watch.watchdog import Watch

_ABORT_TAG = (1 << 30) - 1


@dataclass(eq=False)
class Party:
    """A process group of more than one rank, of which this rank is one.

    Attributes:
        group: The torch process group.
        ranks: The job's numbers of its members.
        scope: Its name, with which its channels begin; empty for the group of all ranks.
        watch: The job's.
        waits_on_host: Whether transfers of tensors on the host block the caller (gloo), instead of a stream.
        has_met: Whether the ranks have looked whether they are on one host.
        mail: Carries short messages where they are (``connect.open_mail``); for the training thread.
    """

    group: Any
    ranks: tuple[int, ...]
    scope: str
    watch: Watch
    waits_on_host: bool
    has_met: bool = False
    mail: Mail | None = None

    def issue(self, channel: str, key: int | None = None) -> tuple[str, int]:
        """Counts what this rank takes part in now; as of ``Watch.issue``."""
        name = f"{self.scope}{channel}"
        return name, self.watch.issue(name, key)

    def guard(
        self,
        blocking: Callable[[], Any],
        ticket: tuple[str, int],
        label: str,
        members: tuple[int, ...] | None = None,
        patience: float | None = None,
    ) -> None:
        """Runs a blocking wait for ``ticket``, supervised; ``members`` are the group's where they are None."""
        self.watch.wait(blocking, *ticket, label, self.ranks if members is None else members, patience=patience)


_job: tuple[Any, Watch] | None = None
_parties: dict[int, Party] = {}


def job_watch() -> Watch:
    """The watch of the job, made when it is first asked for. There must be a process group."""
    global _job
    world = dist.group.WORLD
    if _job is None or _job[0] is not world:
        if _job is not None:
            _job[1].stop()
        _parties.clear()
        rest_at_exit()
        store, rank = rendezvous_store(), dist.get_rank()
        # Counted in the store, per rank: a store may serve one process group after another.
        life = store.add(f"deepspeed/lives/{rank}", 1)
        _job = world, Watch(store, f"deepspeed/{life}", rank, dist.get_world_size())
    return _job[1]


def party_of(group: Any = None) -> Party | None:
    """How ``group`` (None: all ranks) takes part; None where this rank waits for nobody in it, or ranks are played."""
    if stand_in() is not None:
        return None
    watch = job_watch()
    group = dist.group.WORLD if group is None else group
    known = _parties.get(id(group))
    if known is not None and known.group is group:
        return known
    for key in [key for key, party in _parties.items() if not is_alive(party.group)]:
        gone = _parties.pop(key)
        watch.aborts.pop(key, None)
        if gone.mail is not None:
            watch.dismiss(gone.mail)
    if dist.get_rank(group) < 0 or dist.get_world_size(group) == 1:
        return None
    scope = "" if group is dist.group.WORLD else f"{group.group_name}/"
    made = Party(group, tuple(dist.get_process_group_ranks(group)), scope, watch, backend_for(group, None) == "gloo")
    _parties[id(group)] = made
    watch.aborts[id(group)] = functools.partial(_abort, made)
    return made


def forget_all() -> None:
    """Drops what is known of the job: for processes that take part in one job after another."""
    global _job
    if _job is not None:
        _job[1].stop()
    _job = None
    _parties.clear()


def _abort(party: Party) -> None:
    """Makes every pending and later wait of the group raise. Called from the watching thread."""
    if party.waits_on_host:
        # gloo cannot cancel a receive; one that times out closes every pair, which wakes all pending waits. One from a
        # rank whose own pairs are closed fails at once and closes nothing, so that each rank must be tried.
        if not dist.is_initialized():  # the job has ended meanwhile, and with it all waits
            return
        mine = party.ranks.index(dist.get_rank())
        for peer in (place for place in range(len(party.ranks)) if place != mine):
            with contextlib.suppress(RuntimeError):
                party.group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
    with contextlib.suppress(RuntimeError, ValueError):  # a group that was destroyed meanwhile is not known any more
        if dist.get_backend(party.group) != "gloo":
            party.group.abort()
