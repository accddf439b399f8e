"""Supervises blocking waits, so that ranks that wait for each other in a deadlock raise instead of hanging.

A job has one watch for the waits in all its process groups, as a cycle may span several. Every
transfer belongs to a channel (an engine's gathers, its reductions, a group's collectives), and on each channel all
ranks of its group issue the same transfers in the same order. So "I wait for number *i* of channel *c*" can be compared
between ranks. A rank that has waited for a while posts what it waits for, and how far it has issued every channel, in
the rendezvous store, and reads the others' posts, in a job of more than 64 ranks a part of them (``posts.py``). If it
waits for a transfer that the other has not issued, while the other waits for one that it has not issued, neither can
ever continue. That is certain, however stale the post is, because the other's wait needs a transfer that this rank has
not issued even now. The same holds for a cycle of more ranks, over several groups: each waits for the next one. If
number *i* of a channel is a different transfer on two ranks, the ranks have diverged, although each has issued
something under that number. Transfers have keys to detect this, which are posted too. Being late is never an error.

A program may also call torch's own collectives, which are not counted. So a cycle counts only if it is seen twice and
every rank in it has posted again from the same wait in between. Layers that are known to call them report
where they are (:meth:`Watch.note_position`). A rank that has reached a position may need the others there until it
reports the next one. All ranks pass the same positions in the same order, so a position serves like a wait.

Where transfers run on a stream of the device (NCCL), a wait does not block the host: the stream waits, and the host
continues until it needs a result, perhaps in a call of the program that is not supervised (``loss.item()``). An event
is recorded behind every such wait (:meth:`Watch.follow`), and the oldest one that the device has not reached is what
the rank waits for. Transfers that the rank issues later are queued behind it, so a cycle of such waits is as certain as
one of hosts. In a deadlock the communicators are aborted, which ends their kernels without an error; all later waits
raise.

A wait of a minute is logged with the ranks that have not arrived, and again each time it has doubled: they may be late,
or blocked in an unsupervised call, which no error would end.

A rank whose process was killed posts nothing. Other ranks on its machine detect that the process has ended.

A rank whose program ends posts that, so that a rank that still waits for it can report it. A rank that fails where
others depend on it may post the reason (:meth:`Watch.post_failure`), with which they raise.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

from deepspeed.at_exit import ExitAction
from deepspeed.comm.base.batched_store import (
    MOST_THAT_POLL,
    longest_pause,
    read_many,
    those_there,
    wait_at_store,
)
from deepspeed.comm.watch.forward_queue import ForwardQueue, TrainingThread
from deepspeed.comm.watch.posts import MOST_READ, PostReader, members_text
from deepspeed.comm.watch.processes import has_ended, this_process
from deepspeed.comm.watch.wait_records import (
    WaitRecord,
    exit_notice_of,
    find_cycle,
    missing_of,
    plain_error,
    sentence_of,
    words_for_dead,
    words_for_long_wait,
)
from deepspeed.errors import CommunicationError, DivergenceError
from deepspeed.logging import logger, printable

_LONG_WAIT = 60.0  # seconds of a wait until it is logged
_PERIOD = 0.2  # seconds between reads of the store, and the shortest wait that causes one
# Reads per second of all ranks together in a large job: the store serves one operation after another, 15,000 per second
# or more, and a read takes up to ten operations.
_CHECKS_PER_SECOND = 1_000
_GRACE = 5.0  # seconds in which a broken connection may still turn out to be a divergence
_NOTICE_SECONDS = 0.5  # within which both a link and the process group notice the end of a process
_EXIT_NOTICE_TIMEOUT = timedelta(seconds=1)  # the most that posting may delay the end of a program
_LAST_READ_TIMEOUT = timedelta(seconds=5)  # the most that the end of a program waits for a read that has begun
_VERDICT = "verdict"
_FAILURE = "failure"
_ABORT_SECONDS = 30.0  # the longest that aborting all groups may take
_REMEMBERED = 4096  # latest transfers of a channel whose keys are known


class DeviceEvent(Protocol):
    """An event of the device, recorded behind the wait for a transfer."""

    def query(self) -> bool:
        """Returns whether the device has reached it."""


class Member(Protocol):
    """Holds resources of a job, and is closed with it."""

    def leave(self) -> None:
        """Frees its resources. Called when the job ends."""


class Connection(Member, Protocol):
    """A connection for waits outside process groups."""

    def close(self) -> None:
        """Makes all pending and later waits in it raise."""


class Watch:
    """Supervises the waits of one rank of a job."""

    def __init__(self, store: Any, scope: str, rank: int, size: int) -> None:
        self.store = store  # a torch ``Store`` that all ranks of the job share
        self.scope = scope  # prefix of its keys; equal on all ranks and unique to the job
        self.rank = rank
        self._size = size
        # by ``id`` of each process group: an action that makes its pending waits raise
        self.aborts: dict[int, Callable[[], None]] = {}
        # Objects that hold process groups, connections or memory for the job, and are notified when it is over. They
        # may outlive it: a model may keep the graph of a tensor, which the garbage collector cannot traverse.
        self.members: weakref.WeakSet[Member] = weakref.WeakSet()
        self.forward_queue = ForwardQueue()  # data that this rank must forward to others
        # whether ``init_distributed`` has started the process group, and may do so again after a failure
        self.may_restart = False
        self.has_failed = False  # whether a wait of this rank has raised
        self.hears_losses = False  # whether other code calls :meth:`give_up` as soon as a process of the job has ended
        self._connections: weakref.WeakValueDictionary[int, Connection] = weakref.WeakValueDictionary()
        self._owners: dict[str, int] = defaultdict(int)
        self._training = TrainingThread()
        self._is_over = False
        self._checks = 0
        self._logged: tuple[WaitRecord | None, float] = None, 0.0  # a long wait; its seconds when last logged
        # seconds between reads of the store, and the shortest wait that causes one
        self.period = max(_PERIOD, size / _CHECKS_PER_SECOND)
        self._reader = PostReader(store, self._key, rank, size)
        # The latest cycle seen: its ranks with their waits and post numbers; how often
        # all of them have posted again since.
        self._suspected: tuple[dict[int, tuple[str, int]], dict[int, int], int] = ({}, {}, 0)
        self._issued: dict[str, int] = defaultdict(int)
        self._keys: dict[str, dict[int, int]] = defaultdict(dict)  # of a channel's latest transfers, by number
        self._awaited: WaitRecord | None = None
        self._on_device: deque[tuple[WaitRecord, DeviceEvent]] = deque()  # waits of streams, in their order
        self._position: WaitRecord | None = None  # the latest trace point of this rank
        self._decision: str | None = None
        self._exit_notice: str | None = None  # posted by a rank that this one waited for
        self._failure: str | None = None  # posted by any rank
        self._has_aborted = False
        self._patience = _GRACE
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._processes: dict[int, str] = {}  # process names of other ranks, as they posted them
        self.store.set(self._key(f"process/{rank}"), this_process())
        self._at_exit = ExitAction(functools.partial(_post_exit_notice, weakref.ref(self)))

    def stop(self) -> None:
        """Ends the watching thread; nothing is posted at the program's end, as the process groups are gone."""
        self._end_thread(timedelta(0))
        self._at_exit.cancel()
        for member in list(self.members):
            member.leave()
        self.aborts.clear()
        self.forward_queue.clear()

    def supervise(self, connection: Connection) -> None:
        """Closes ``connection`` on a deadlock, and notifies it when the job is over."""
        self._connections[id(connection)] = connection
        self.members.add(connection)

    def dismiss(self, connection: Connection) -> None:
        """Notifies ``connection`` that it ends before the job."""
        self._connections.pop(id(connection), None)
        self.members.discard(connection)
        connection.leave()

    def next_owner(self, scope: str = "") -> int:
        """Counts the engines of a group from 0; ``scope`` is the group's name."""
        self._owners[scope] += 1
        return self._owners[scope] - 1

    def issue(self, channel: str, key: int | None = None) -> int:
        """Counts a transfer that this rank starts to take part in; returns its number on the channel.

        ``key`` is equal on all ranks for this transfer; None: its number identifies it.
        """
        self._issued[channel] += 1
        index = self._issued[channel]
        if key is not None:
            keys = self._keys[channel]
            keys[index] = key
            keys.pop(index - _REMEMBERED, None)
        return index

    def issued_over(self, scope: str) -> dict[str, int]:
        """Returns how many transfers this rank has issued on each channel of a process group, for any engine."""
        issued = dict(self._issued).items()
        return {channel: count for channel, count in issued if channel.partition("/")[2].startswith(scope)}

    def wait(
        self,
        blocking: Callable[[], Any],
        channel: str,
        index: int,
        label: str,
        members: tuple[int, ...],
        *,
        patience: float | None = None,
        on_stream: bool = False,
        gives_up: bool = False,
    ) -> None:
        """Runs a blocking wait.

        Args:
            blocking: Blocks until the wait is over.
            channel: The channel of the transfer.
            index: Its number on the channel.
            members: The ranks that take part in it; none if any may.
            patience: Seconds to look for the cause of a failed wait; None: a few seconds, for the first failure only.
            on_stream: Whether the transfer runs on a stream of the device, behind all that was queued before it.
            gives_up: Whether the rank continues without it after a while, so that the wait is no part of a cycle.

        Raises:
            DivergenceError: The transfer can never complete.
            CommunicationError: The transfer failed otherwise, or its communicator was aborted meanwhile.
        """
        awaited = WaitRecord(channel, index, members, label, time.monotonic(), on_stream, gives_up)
        # Waits outside the training thread are not posted: a broken connection is enough to end them.
        beside = self._training.is_elsewhere()
        if not beside:
            self._begin_watching()
            outer = self._awaited
            self._awaited = awaited
        try:
            blocking()
        except RuntimeError as error:
            raise self._explain(error, awaited, patience) from error
        finally:
            if not beside:
                self._awaited = outer
        if self._has_aborted:
            # Where transfers run on a stream, an aborted one ends without an error and leaves its buffers as they were.
            raise self._explain(RuntimeError("the communicator was aborted"), awaited, 0.0)

    def follow(self, reached: DeviceEvent, channel: str, index: int, label: str, members: tuple[int, ...]) -> None:
        """Supervises a wait of a stream, which does not block the host; ``reached`` is recorded behind it there.

        The other arguments are as of :meth:`wait`.
        """
        self._begin_watching()
        if self._thread is None or not self._thread.is_alive():  # no thread would remove it from the queue
            self._on_device.clear()
            return
        self._on_device.append((WaitRecord(channel, index, members, label, time.monotonic(), True), reached))

    def _stuck_on_device(self) -> WaitRecord | None:
        """Returns the oldest wait of a stream that is not over; None if the driver does not report it.

        Forgets those that are over. CUDA refuses queries while another thread captures a graph.
        """
        with contextlib.suppress(RuntimeError):
            while self._on_device and self._on_device[0][1].query():
                self._on_device.popleft()
            return self._on_device[0][0] if self._on_device else None
        return None

    def note_position(self, awaited: WaitRecord) -> None:
        """Records the position at which this rank may wait from now on, in code whose waits are not supervised."""
        self._begin_watching()
        self._awaited = self._position = awaited

    def known_reason(self) -> Exception | None:
        """Returns why a wait at this rank's latest position failed, if any rank has posted it. Does not wait."""
        return None if self._position is None else self._reason(self._position, 0.0)[0]

    def _begin_watching(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_watching, args=(weakref.ref(self), self._wake), name="deepspeed-watch", daemon=True
            )
            self._thread.start()

    def wait_for_keys(
        self, keys: Sequence[str], channel: str, index: int, label: str, members: tuple[int, ...], timeout: timedelta
    ) -> None:
        """Waits until ``keys`` are in the store; otherwise like :meth:`wait`.

        Raises:
            DivergenceError: They can never appear.
            CommunicationError: They did not appear within ``timeout``, or the store is gone.
        """
        self.wait(lambda: self._look_for(list(keys), timeout), channel, index, label, members)

    def _look_for(self, keys: list[str], timeout: timedelta) -> None:
        started, limit = time.monotonic(), timeout.total_seconds()
        while not self._is_there(keys, time.monotonic() - started):
            if self.is_in_vain():
                raise RuntimeError("other ranks took another branch")
            if time.monotonic() - started >= limit:
                raise RuntimeError(f"not all ranks arrived within {timeout}")

    def _is_there(self, keys: list[str], waited: float) -> bool:
        if self._size > MOST_THAT_POLL:
            return all(wait_at_store(self.store, key, self._size) for key in keys)
        if self.store.check(keys):
            return True
        longest = longest_pause(self._size, _PERIOD)
        # in large jobs longer, so that ranks do not all ask at once
        shortest = max(0.001, longest_pause(self._size, 0.0) / 4)
        time.sleep(min(max(0.1 * waited, shortest), longest))  # a tenth late at most
        return False

    def is_in_vain(self) -> bool:
        """Returns whether every wait is known to fail."""
        return any(end is not None for end in (self._decision, self._exit_notice, self._failure))

    def post_failure(self, text: str) -> None:
        """Posts that this rank has failed: ranks that wait, now or later, raise with ``text``.

        Only the first post counts.
        """
        # the store ended with the rank that served it, which ends the others too
        with contextlib.suppress(RuntimeError):
            self.store.compare_set(self._key(_FAILURE), "", text)

    def give_up(self, text: str) -> None:
        """Makes all waits of this rank raise with ``text``, now and later. May be called from any thread.

        Other ranks are not notified.
        """
        if self._is_over or self.is_in_vain():
            return
        self._failure = text
        self._abort_all()

    def _abort_all(self) -> None:
        self._has_aborted = True
        run_together(list(self.aborts.values()), _ABORT_SECONDS)
        for reference in self._connections.valuerefs():
            if (connection := reference()) is not None:
                connection.close()

    def look_after_long_wait(self) -> bool:
        """Runs one period of the watch thread; returns whether it continues."""
        if self._is_over:
            return False
        awaited, blocks_host = self._awaited, True
        stuck = self._stuck_on_device()
        if stuck is not None and (awaited is None or awaited.on_stream):
            # The host's wait is queued behind it in the stream.
            awaited, blocks_host = stuck, awaited is not None and not awaited.gives_up
        if awaited is None or time.monotonic() - awaited.since < self.period:
            return True
        try:
            self._decision = self._check(awaited, blocks_host=blocks_host)
        except RuntimeError:
            return False  # the store ended with its rank; the waiting thread sees the broken connection
        if self.is_in_vain():
            self._abort_all()
        return not self.is_in_vain()

    def _check(self, awaited: WaitRecord, *, blocks_host: bool) -> str | None:
        """Posts this rank's wait; returns the verdict if this rank and others wait in vain.

        ``blocks_host`` says whether the host waits too, and not only a stream of the device.
        """
        self._checks += 1
        mine = {
            "check": self._checks,
            "channel": awaited.channel,
            "index": awaited.index,
            "members": members_text(awaited.members),
            "label": awaited.label,
            "on_stream": awaited.on_stream,
            "blocks_host": blocks_host,
            "gives_up": awaited.gives_up,
            "issued": dict(self._issued),
            "key": self._key_of(awaited.channel, awaited.index),
        }
        self.store.set(self._key(self.rank), json.dumps(mine))
        if self.store.check([self._key(_VERDICT)]):
            return self._read(_VERDICT)
        if self.store.check([self._key(_FAILURE)]):
            self._failure = self._read(_FAILURE)
            return None
        suspected = self._suspected[0].keys()
        if suspected and self._size > MOST_READ:
            posts = self._reader.read_only(suspected)
        else:
            everything = self._size <= MOST_READ or self._reader.is_turn(self._checks)
            posts = self._reader.read(awaited.members, everything=everything)
        posts[self.rank] = {**mine, "members": awaited.members}
        self._exit_notice = exit_notice_of(awaited, posts)
        if self._exit_notice is not None:
            if self._size > MOST_READ:  # most ranks have not read the post of the one that has ended
                self.post_failure(self._exit_notice)
            return None
        if (dead := self._dead_among(posts)) is not None:
            self._failure = words_for_dead(dead, self.rank, awaited)
            self.post_failure(self._failure)
            return None
        self._log_long_wait(awaited, posts)
        cycle = find_cycle(posts, self.rank) or self._parted_from(posts)
        if not self._is_still_there({rank: posts[rank] for rank in cycle}):
            return None
        decision = sentence_of({rank: posts[rank]["label"] for rank in cycle})
        self.store.set(self._key(_VERDICT), decision)
        return decision

    def _log_long_wait(self, awaited: WaitRecord, posts: dict[int, dict[str, Any]]) -> None:
        """Logs the missing ranks of a wait after one minute, two, four and so on; on the first rank that waits."""
        seconds = time.monotonic() - awaited.since
        logged, before = self._logged
        if seconds < (2 * before if logged == awaited else _LONG_WAIT) or awaited.gives_up:
            return
        missing = missing_of(awaited, {rank: post for rank, post in posts.items() if rank != self.rank})
        waiting = (posts.keys() & set(awaited.members or posts)) - set(missing)
        if missing and self.rank == min(waiting | {self.rank}):
            self._logged = awaited, seconds
            logger.warning(words_for_long_wait(missing, self.rank, awaited, seconds))

    def _dead_among(self, posts: dict[int, dict[str, Any]]) -> int | None:
        """Returns a rank of this machine that is waited for and whose process has ended without a post."""
        others = [rank for rank, post in posts.items() if rank != self.rank and not post.get("has_left")]
        by_key = {self._key(f"process/{rank}"): rank for rank in others if rank not in self._processes}
        there = those_there(self.store, list(by_key))
        for key, text in zip(there, read_many(self.store, there), strict=True):
            self._processes[by_key[key]] = text.decode(errors="replace")
        return next((rank for rank in others if has_ended(self._processes.get(rank, ""))), None)

    def _is_still_there(self, cycle: dict[int, dict[str, Any]]) -> bool:
        """Returns whether every rank of ``cycle`` has posted again from the same wait since the cycle was first seen.

        Of this rank its own state is known. A cycle of other ranks must be seen once more: their posts were not read
        at one moment, but all of them were there already when the first reading ended.
        """
        waits = {rank: (post["channel"], post["index"]) for rank, post in cycle.items()}
        checks = {rank: post["check"] for rank, post in cycle.items()}
        before, first, seen_again = self._suspected
        if not cycle or before != waits:
            self._suspected = waits, checks, 0
            return False
        if all(checks[rank] > check for rank, check in first.items()):
            self._suspected, seen_again = (waits, checks, seen_again + 1), seen_again + 1
        return seen_again >= (1 if self.rank in cycle else 2)

    def _key_of(self, channel: str, index: int) -> int | None:
        keys = self._keys.get(channel)
        return None if keys is None else keys.get(index)

    def _parted_from(self, posts: dict[int, dict[str, Any]]) -> list[int]:
        """Returns this rank and one that waits for a different transfer under a number that this rank has used."""
        for rank, post in posts.items():
            theirs, mine = post.get("key"), self._key_of(post.get("channel", ""), post.get("index", 0))
            differ = theirs is not None and mine is not None and theirs != mine
            if differ and self.rank in post.get("members", ()):
                return [rank, self.rank]
        return []

    def _key(self, name: object) -> str:
        return f"{self.scope}/watch/{name}"

    def _read(self, name: object) -> str:
        value = self.store.get(self._key(name))
        return printable(value.decode(errors="replace") if isinstance(value, bytes) else str(value))

    def _explain(self, error: RuntimeError, awaited: WaitRecord, patience: float | None) -> Exception:
        """Explains a failed wait: by a verdict of any rank, by the end of a rank's program, or by something else."""
        self.has_failed = True
        seconds = self._patience if patience is None else patience
        if patience is None:
            self._patience = 0.0  # the failure is permanent; later waits need not look for a cause
        reason, gone = self._reason(awaited, seconds)
        return reason or CommunicationError(
            f"waiting for {awaited.words} failed; a peer has probably died or timed out{gone}: {plain_error(error)}"
        )

    def _reason(self, awaited: WaitRecord, patience: float) -> tuple[Exception | None, str]:
        """Returns the failure that a rank posted, or posts within ``patience`` seconds; and a note on a lost store."""
        deadline = time.monotonic() + patience
        gone = ""
        if self.hears_losses:  # the store may have ended with the lost process, and torch logs much about that
            notice_deadline = time.monotonic() + _NOTICE_SECONDS
            while not self.is_in_vain() and time.monotonic() < notice_deadline:
                time.sleep(0.005)
        while not self.is_in_vain():
            try:
                if self.store.check([self._key(_VERDICT)]):
                    self._decision = self._read(_VERDICT)
                elif self.store.check([self._key(_FAILURE)]):
                    self._failure = self._read(_FAILURE)
                else:
                    posts = self._reader.read(awaited.members, everything=self._size <= MOST_READ)
                    self._exit_notice = exit_notice_of(awaited, posts)
            except RuntimeError:
                gone = " (rank 0 is gone, with the store that it held)"
                break
            if time.monotonic() >= deadline:
                break
            time.sleep(max(0.05, 0.1 * self.period))
        if self._decision is not None:
            return DivergenceError(self._decision), gone
        if self._failure is not None:
            return CommunicationError(self._failure), gone
        if self._exit_notice is not None:
            return CommunicationError(self._exit_notice), gone
        return None, gone

    def post_exit_notice(self) -> None:
        """Posts that this rank's program has ended."""
        if self._is_over or self._size == 1:
            return
        # A thread that is inside torch when the interpreter ends crashes the process.
        self._end_thread(_LAST_READ_TIMEOUT)
        try:
            # A file store whose folder was deleted would wait for it.
            self.store.set_timeout(_EXIT_NOTICE_TIMEOUT)
            self.store.set(self._key(self.rank), json.dumps({"has_left": True, "issued": dict(self._issued)}))
        except RuntimeError:
            return  # the store ended with its rank: no rank is left to read this

    def _end_thread(self, patience: timedelta) -> None:
        self._is_over = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(patience.total_seconds())


def _post_exit_notice(reference: weakref.ref[Watch]) -> None:
    watch = reference()
    if watch is not None:
        watch.post_exit_notice()


def run_together(actions: Sequence[Callable[[], None]], seconds: float) -> None:
    """Runs all actions at once, each in a thread, and returns when they are done or the time is up.

    An abort in NCCL waits for the whole device, on which a kernel of another communicator may wait for a lost rank
    until its own communicator is aborted. So sequential aborts could deadlock. After ``seconds`` the number of
    unfinished actions is logged, and they are abandoned.
    """
    deadline = time.monotonic() + seconds
    threads = [threading.Thread(target=action, daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    if left := sum(thread.is_alive() for thread in threads):
        logger.warning(f"{left} of {len(threads)} process group(s) were not aborted within {seconds:g} s")


def _watching(reference: weakref.ref[Watch], wake: threading.Event) -> None:
    """Runs the watching thread, with a weak reference: it must not keep the watch, process group and sockets alive."""
    is_running, period = True, _PERIOD
    while is_running:
        wake.wait(period)
        watch = reference()
        is_running = watch is not None and watch.look_after_long_wait()
        period = period if watch is None else watch.period
        del watch
