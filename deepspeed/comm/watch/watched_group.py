"""The watch of a job, and its process groups as the watch sees them.

Ranks are numbered as the job numbers them, regardless of the group: so cycles across
several groups are found, and messages name ranks as the launcher does.

At exit the groups wait until gloo's threads have released the program's tensors. A thread reports a finished
collective before it drops the tensors. If it is delayed in between, as on an overloaded machine, the interpreter may
have ended meanwhile; dropping a tensor that Python has wrapped then aborts the process (signal 6), although all its
work is done. Torch waits for these
threads where the last reference to a group goes before the program ends, but engines and wrapped models keep theirs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from deepspeed.comm.base.counters import PROGRAM, waiting
from deepspeed.comm.base.ranks import Ranks
from deepspeed.comm.base.torch_groups import is_alive, rendezvous_store
from deepspeed.comm.watch.watchdog import Connection, Watch

_ABORT_TAG = (1 << 30) - 1


class ShortMessages(Connection, Protocol):
    """Carries short messages between the ranks of one group. Used by the training thread only.

    Messages between two ranks with the same ``tag`` arrive in the order in which they are posted.
    """

    @property
    def has_unsent(self) -> bool:
        """Whether messages posted by this rank are still unsent."""

    def post(self, peer: int, tag: int, message: Any) -> None:
        """Sends a message (a buffer of bytes) to a peer of the group; does not wait for it."""

    def take(self, peer: int, tag: int, buffer: memoryview) -> None:
        """Blocks until a message of a peer has been written to ``buffer``, which has the same length."""

    def take_if_there(self, peer: int, tag: int, buffer: memoryview) -> bool:
        """Like :meth:`take` if the message has arrived, else does nothing; returns whether it has."""

    def flush(self) -> None:
        """Blocks until all posted messages are sent."""


@dataclass(eq=False)
class WatchedGroup:
    """A process group of more than one rank, of which this rank is one."""

    group: Any  # the torch process group
    ranks: tuple[int, ...]  # the job's numbers of its members
    scope: str  # its name, with which its channels begin; empty for the group of all ranks
    watch: Watch  # the job's
    waits_on_host: bool  # whether transfers of tensors on the host block the caller (gloo), instead of a stream
    has_met: bool = False  # whether the ranks have checked if they are on one host
    # carries short messages if they are on one host (``connect.open_message_queue``)
    queue: ShortMessages | None = None
    open_rows: int = 0  # number of batches of transfers that have begun and not ended, see :meth:`row`

    @contextmanager
    def row(self, channel: str) -> Iterator[None]:
        """Counts a batch of transfers between pairs of members; each member takes part in some.

        All members begin and end a batch together, and wait for every transfer in it. After an error a transfer may
        lack its counterpart: the batch then stays open, and no other engine takes the group.
        """
        self.watch.issue(f"rows/{self.scope}{channel}")  # in the form that ``Watch.issued_over`` expects
        self.open_rows += 1
        yield
        self.open_rows -= 1

    def issue(self, channel: str, key: int | None = None) -> tuple[str, int]:
        """Counts a transfer of this rank and returns its ticket; arguments as in ``Watch.issue``."""
        name = f"{self.scope}{channel}"
        return name, self.watch.issue(name, key)

    def guard(
        self,
        blocking: Callable[[], Any],
        ticket: tuple[str, int],
        label: str,
        members: tuple[int, ...] | None = None,
        patience: float | None = None,
        axis: str = PROGRAM,
    ) -> None:
        """Runs a blocking wait for ``ticket`` (of :meth:`issue`), supervised and timed; see ``Watch.wait``.

        ``members`` are the job's numbers of the ranks that it needs; None: all of the group. ``axis`` names them, as
        traffic is counted.
        """

        def supervised() -> None:
            self.watch.wait(blocking, *ticket, label, self.ranks if members is None else members, patience=patience)

        if waiting.is_running:
            waiting.run(supervised, axis, label)
        else:
            supervised()


@dataclass(eq=False)
class GroupRecord:
    """Holds what belongs to one process group of a job, until the group is destroyed."""

    group: Any  # the torch process group
    watched: WatchedGroup | None  # how it is watched; None where this rank waits for no other in it
    transports: dict[Any, Any] = field(default_factory=dict)  # transports that exist once per group, by their use
    made: Any = None  # how ``comm.job.new_groups`` made it; None: the program made it


class WatchedGroups:
    """The process groups of one job that are in use, and the watch over waits in them."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._watch: Watch | None = None
        self._records: dict[int, GroupRecord] = {}

    @property
    def watch(self) -> Watch:
        """The watch of the job, made when it is first requested. There must be a process group."""
        if self._watch is None:
            drain_gloo_at_exit()
            store, rank = rendezvous_store(), dist.get_rank()
            # Counted in the store, per rank: a store may serve one job after another.
            life = store.add(f"deepspeed/lives/{rank}", 1)
            self._watch = Watch(store, f"deepspeed/{life}", rank, dist.get_world_size())
        return self._watch

    def begin(self) -> None:
        """Makes the watch, which posts the end of this program for the other ranks. There must be a process group."""
        self.watch  # noqa: B018

    @property
    def has_failed(self) -> bool:
        """Whether a wait of this rank has raised."""
        return self._watch is not None and self._watch.has_failed

    def of(self, group: Any = None) -> WatchedGroup | None:
        """Returns how ``group`` (None: all ranks) is watched; None where this rank waits for no other in it."""
        return self.record_of(group).watched

    def record_of(self, group: Any = None) -> GroupRecord:
        """Returns the record of ``group`` (None: all ranks), made when it is first requested."""
        watch = self.watch
        group = dist.group.WORLD if group is None else group
        known = self._records.get(id(group))
        if known is not None and known.group is group:
            return known
        self._forget_destroyed()
        made = GroupRecord(group, None)
        if dist.get_rank(group) >= 0 and dist.get_world_size(group) > 1:
            scope = "" if group is dist.group.WORLD else f"{group.group_name}/"
            waits_on_host = self._ranks.backend_for(group, None) == "gloo"
            made.watched = WatchedGroup(group, tuple(dist.get_process_group_ranks(group)), scope, watch, waits_on_host)
            watch.aborts[id(group)] = functools.partial(_abort, made.watched)
        self._records[id(group)] = made
        return made

    def records(self) -> list[GroupRecord]:
        """Returns the records of all groups that have not been destroyed, oldest first."""
        self._forget_destroyed()
        return list(self._records.values())

    def known_reason(self) -> Exception | None:
        """Returns why waits of this job fail, where the watch has found it out."""
        return self.watch.known_reason() if self._ranks.is_initialized() else None

    def close(self) -> None:
        """Ends the watch, and drops what is kept for the groups."""
        if self._watch is not None:
            self._watch.stop()
        self._watch = None
        self._records.clear()

    def _forget_destroyed(self) -> None:
        for key in [key for key, record in self._records.items() if not is_alive(record.group)]:
            gone = self._records.pop(key)
            if self._watch is not None and gone.watched is not None:
                self._watch.aborts.pop(key, None)
                if gone.watched.queue is not None:
                    self._watch.dismiss(gone.watched.queue)


def _abort(watched: WatchedGroup) -> None:
    """Makes all pending and later waits of the group raise. Called from the watching thread."""
    if watched.waits_on_host:
        # gloo cannot cancel a receive; one that times out closes every pair, which wakes all pending waits. One from a
        # rank whose own pairs are closed fails at once and closes nothing, so that each rank must be tried.
        if not dist.is_initialized():  # the job has ended meanwhile, and with it all waits
            return
        mine = watched.ranks.index(dist.get_rank())
        for peer in (place for place in range(len(watched.ranks)) if place != mine):
            with contextlib.suppress(RuntimeError):
                watched.group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
    with contextlib.suppress(RuntimeError, ValueError):  # a group that was destroyed meanwhile is not known any more
        if dist.get_backend(watched.group) != "gloo":
            watched.group.abort()


_THREADS = Path("/proc/self/task")  # Linux only; elsewhere threads cannot be listed
_NAME = "pt_gloo"  # prefix of the names of threads that run collectives
_POLL_SECONDS = 0.001  # seconds between checks, so that such a thread can take the interpreter lock
_PATIENCE = 5.0  # seconds


@functools.cache
def drain_gloo_at_exit() -> None:
    """Registers :func:`wait_for_gloo_threads` to run at exit; further calls have no effect."""
    atexit.register(wait_for_gloo_threads)


def wait_for_gloo_threads() -> None:
    """Returns when no gloo thread is computing: all wait for something, perhaps for other ranks."""
    deadline = time.monotonic() + _PATIENCE
    while any(map(_computes, _tasks())) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _tasks() -> list[Path]:
    try:
        return list(_THREADS.iterdir())
    except OSError:
        return []


def _computes(task: Path) -> bool:
    """Returns whether a thread is one of gloo's and is runnable: running, or waiting only for a processor."""
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:  # it has ended
        return False
    return name.startswith(_NAME) and rest.split()[0] == "R"
