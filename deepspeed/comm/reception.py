"""Who is let in at a rendezvous: before the ranks of a run use a store, each says which run it belongs to.

Two runs need only a port in common for their processes to connect to one store, and there rank 1 of the one looks like
rank 1 of the other. So nothing is put under a name that two of them could share before rank 0, the host, has seen who
is there. Every other process takes a number, posts who it is, and waits for the answer under its number. The host lets
in one process per rank, and refuses by name who belongs to another run: there the whole run knows, here a line says so.
What it tells those who are let in is where the run's own keys begin, under a word that nobody else can know.

Most starters give a run a name (``Place.run``). Where none does, whoever runs something else on rank 0's machine, and
was not started together with it, counts as a stranger. Where two processes come as one rank and nothing tells which of
them is right, all are refused: a run of mixed ranks trains on garbage.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from deepspeed.comm.place import Place
from deepspeed.comm.startup import Facts, compare_facts, wait_for_readers
from deepspeed.errors import CommunicationError
from deepspeed.logging import logger
from deepspeed.ports import shortened

_SCOPE = "deepspeed/reception"
_ARRIVALS, _HOST, _CLOSED, _READ = (f"{_SCOPE}/{name}" for name in ("arrivals", "host", "closed", "read"))
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
_RANK_ARGUMENT = re.compile(r"^(--?[\w-]*rank)(=\d+)?$")
# How long who finds a meeting that is over without it waits: the host may be about to call the next one.
_LATE_SECONDS = 5.0
_IMPATIENT_SECONDS = 30.0
_OWN_PORT = (
    "Each run needs a port of its own: set MASTER_PORT (--master_port of `deepspeed`, --master-port of torchrun) to a "
    "free one, the same on all ranks"
)


@dataclass(frozen=True)
class Guest:
    """One process that comes to where the ranks meet.

    Attributes:
        rank: Which rank it says it is.
        world_size: How many it counts.
        run: Its run, as :attr:`~.place.Place.run`.
        command: Its command line, shortened.
        job: The same for all ranks that run the same script with the same arguments.
        parent: Its parent process.
        facts: What must match.
    """

    rank: int
    world_size: int
    run: str
    command: str
    job: str
    parent: int
    facts: Facts

    @classmethod
    def here(cls, place: Place, facts: Facts) -> Guest:
        """This process."""
        command = shortened(sys.argv)
        return cls(place.rank, place.world_size, place.run, command, job_of(sys.argv), os.getppid(), facts)

    @classmethod
    def from_json(cls, text: str | bytes) -> Guest:
        """What :meth:`to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "facts": Facts(**values["facts"])})

    def to_json(self) -> str:
        """For the store."""
        return json.dumps(asdict(self))

    @property
    def name(self) -> str:
        """Host, process and job in words."""
        run = f" ({self.run})" if self.run else ""
        what = f"rank {self.rank} of {self.world_size} of `{self.command}`{run}"
        return f"process {self.facts.pid} on host {self.facts.host}, {what}"

    @property
    def process(self) -> tuple[str, int]:
        """What tells it from all others."""
        return self.facts.host, self.facts.pid

    def is_related_to(self, other: Guest) -> bool:
        """Whether both were surely started together: by one parent, or one by the other."""
        if self.facts.host != other.facts.host:
            return False
        started_together = self.parent == other.parent and self.parent > 1
        return started_together or self.parent == other.facts.pid or other.parent == self.facts.pid


def job_of(words: Sequence[str]) -> str:
    """A digest of a command line without what differs between the ranks of one run."""
    kept = [_RANK_ARGUMENT.sub(r"\1", word) for word in words]
    for number, word in enumerate(kept[:-1]):
        if _RANK_ARGUMENT.fullmatch(word) and kept[number + 1].isdecimal():
            kept[number + 1] = ""
    return hashlib.sha256("\0".join(kept).encode()).hexdigest()[:16]


def receive_ranks(store: Any, guest: Guest, where: str, timeout: timedelta) -> tuple[str, list[Facts]]:
    """Brings the ranks of one run together. All of them must call it, with a store that nobody has used for more.

    Args:
        store: A torch ``Store``; processes of other runs may have it too.
        guest: This process.
        where: The store's place, for messages.
        timeout: How long to wait for the others.

    Returns:
        Prefix of the keys of this run; and on rank 0 the facts of all ranks, on the others an empty list.

    Raises:
        CommunicationError: This process belongs to another run than the one that meets here, the ranks do not match, or
            some did not come.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        if guest.rank == 0:
            return _Host(store, guest, where, timeout).receive(deadline)
        return _attend(store, guest, where, timeout, deadline), []
    except RuntimeError as error:
        if isinstance(error, CommunicationError):
            raise
        raise CommunicationError(
            f"{guest.name}: the store at {where} went away before all ranks had met, with the process that held it "
            f"({error}). Look for the error of rank 0"
        ) from error


# --- rank 0 -----------------------------------------------------------------------------------------------------------


class _Host:
    """Rank 0's part: who is let in."""

    def __init__(self, store: Any, me: Guest, where: str, timeout: timedelta) -> None:
        self._store = store
        self._me = me
        self._where = where
        self._timeout = timeout
        self._seen = 0
        self._late: set[int] = set()  # numbers taken by who has not said its name yet
        self._members: dict[int, tuple[int, Guest]] = {}  # by rank: its number, and who it is
        self._verdict: str | None = None

    def receive(self, deadline: float) -> tuple[str, list[Facts]]:
        """Lets the ranks in; see :func:`receive_ranks`."""
        self._open()
        pause = _pauses()
        impatient_at = time.monotonic() + _IMPATIENT_SECONDS
        while True:
            self._look_at_arrivals()
            now = time.monotonic()
            if self._verdict is not None or not self._missing():
                break
            if now > deadline:
                self._verdict = self._absence()
            elif now > impatient_at:
                impatient_at += _IMPATIENT_SECONDS
                logger.warning(f"still waiting at {self._where} for {self._named_missing()}")
            pause()
        guests = [self._me, *(self._members[rank][1] for rank in sorted(self._members))]
        self._verdict = self._verdict or compare_facts([guest.facts for guest in guests])
        prefix = self._close(guests)
        if self._verdict is not None:
            raise CommunicationError(self._verdict)
        return prefix, [guest.facts for guest in guests]

    def _open(self) -> None:
        mine = self._me.to_json()
        there = Guest.from_json(self._store.compare_set(_HOST, "", mine))
        if there.process != self._me.process:
            number = self._store.add(_ARRIVALS, 1)
            self._store.set(f"{_SCOPE}/arrival/{number}", mine)  # so that the other one is told
            raise CommunicationError(_refusal(self._me, there, self._where))
        if self._store.check([_CLOSED]):  # this process has met others here before
            self._seen = json.loads(self._store.get(_CLOSED) or "{}").get("seen", 0)
            self._store.set(_HOST, mine)
            self._store.set(_CLOSED, "")

    def _look_at_arrivals(self) -> None:
        count = self._store.add(_ARRIVALS, 0)
        unknown = [*sorted(self._late), *range(self._seen + 1, count + 1)]
        self._seen = count
        for number in unknown:
            if self._store.check([f"{_SCOPE}/arrival/{number}"]):
                self._late.discard(number)
                self._judge(number, Guest.from_json(self._store.get(f"{_SCOPE}/arrival/{number}")))
            else:
                self._late.add(number)

    def _judge(self, number: int, guest: Guest) -> None:
        me = self._me
        fits = guest.run == me.run and guest.world_size == me.world_size and 0 < guest.rank < me.world_size
        if not fits or (not me.run and self._is_another_job(guest)):
            self._refuse(number, guest)
            return
        there = self._members.get(guest.rank)
        if there is None or there[1].process == guest.process:
            self._members[guest.rank] = (number, guest)
            return
        is_ours, was_ours = guest.is_related_to(me), there[1].is_related_to(me)
        if is_ours and not was_ours:
            self._refuse(*there)
            self._members[guest.rank] = (number, guest)
        elif was_ours and not is_ours:
            self._refuse(number, guest)
        else:
            self._answer(number, error=self._dispute(there[1], guest))
            self._verdict = self._dispute(there[1], guest)

    def _refuse(self, number: int, guest: Guest) -> None:
        logger.warning(f"{self._where}: refused {guest.name}: it is of another run than this one, {self._me.name}")
        self._answer(number, error=_refusal(guest, self._me, self._where))

    def _dispute(self, first: Guest, second: Guest) -> str:
        return (
            f"two processes came to {self._where} as one rank: {first.name}; and {second.name}. Either a rank was "
            "started twice, or two runs meet at one port and nothing tells which of them belongs to rank 0, "
            f"{self._me.name}. {_OWN_PORT}; DS_RUN_ID, the same for all processes of a run, names it"
        )

    def _is_another_job(self, guest: Guest) -> bool:
        me = self._me
        return guest.facts.host == me.facts.host and guest.job != me.job and not guest.is_related_to(me)

    def _missing(self) -> list[int]:
        if len(self._members) == self._me.world_size - 1:
            return []
        return [rank for rank in range(1, self._me.world_size) if rank not in self._members]

    def _named_missing(self) -> str:
        missing = self._missing()
        some = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return f"{'rank' if len(missing) == 1 else 'ranks'} {some} of {self._me.world_size}"

    def _absence(self) -> str:
        return (
            f"{self._named_missing()} did not come to {self._where} within {self._timeout}. Check that all "
            f"{self._me.world_size} processes were started and can reach that address"
        )

    def _answer(self, number: int, **answer: str) -> None:
        self._store.set(f"{_SCOPE}/answer/{number}", json.dumps(answer))

    def _close(self, guests: list[Guest]) -> str:
        """Answers those who were let in; returns the prefix of the run's keys."""
        prefix = f"deepspeed/run/{uuid.uuid4().hex}"
        readers = self._store.add(_READ, 0) + len(self._members)
        for number, _ in self._members.values():
            if self._verdict is None:
                self._answer(number, prefix=prefix)
            else:
                self._answer(number, error=self._verdict)
        names = {guest.rank: (guest.process, guest.name) for guest in guests}
        self._store.set(_CLOSED, json.dumps({"seen": self._seen, "members": names}))
        if self._verdict is not None:
            wait_for_readers(self._store, _READ, readers)
        return prefix


def _refusal(guest: Guest, host: Guest, where: str) -> str:
    """What a process is told that is not let in."""
    missing = ". If both are one run, give all its processes the same DS_RUN_ID" if not (guest.run and host.run) else ""
    return (
        f"{where} is where another run meets: that of {host.name}. This is {guest.name}, which was refused there. "
        f"{_OWN_PORT}{missing}"
    )


# --- the other ranks --------------------------------------------------------------------------------------------------


def _attend(store: Any, guest: Guest, where: str, timeout: timedelta, deadline: float) -> str:
    """Another rank's part; returns the prefix of the run's keys."""
    number = store.add(_ARRIVALS, 1)
    store.set(f"{_SCOPE}/arrival/{number}", guest.to_json())
    key = f"{_SCOPE}/answer/{number}"
    pause = _pauses()
    late_at: float | None = None
    impatient_at = time.monotonic() + _IMPATIENT_SECONDS
    while not store.check([key]):
        now = time.monotonic()
        if now > impatient_at and not store.check([_HOST]):
            impatient_at = deadline
            logger.warning(f"{guest.name}: no word from rank 0 at {where} yet; the store there may be another run's")
        reason = _is_over_without(store, guest, where)
        late_at = None if reason is None else late_at or now + _LATE_SECONDS
        if reason is not None and late_at is not None and now > late_at and not store.check([key]):
            raise CommunicationError(reason)
        # Where rank 0 is there, it knows better who is missing.
        if now > deadline + (_LATE_SECONDS if store.check([_HOST]) else 0.0):
            raise CommunicationError(
                f"{guest.name}: no word from rank 0 at {where} within {timeout}. Check that all {guest.world_size} "
                "processes were started and can reach that address, and that no other program holds the port"
            )
        pause()
    answer = json.loads(store.get(key))
    store.add(_READ, 1)
    if "error" in answer:
        raise CommunicationError(answer["error"])
    return str(answer["prefix"])


def _is_over_without(store: Any, guest: Guest, where: str) -> str | None:
    """Why this process comes too late; None while the meeting is not over, or if it has been at it before."""
    if not store.check([_CLOSED]):
        return None
    closed = json.loads(store.get(_CLOSED) or "{}")
    members = closed.get("members", {})
    if not members or any(tuple(process) == guest.process for process, _ in members.values()):
        return None
    _, host = members["0"]
    same = members.get(str(guest.rank))
    place = f"; its rank {guest.rank} is {same[1]}" if same is not None else ""
    return (
        f"{where} is where another run has met already: that of {host}{place}. This is {guest.name}, and was not at "
        f"that meeting. {_OWN_PORT}. A file that an earlier run has left at init_method must be deleted"
    )


def _pauses() -> Callable[[], None]:
    """Sleeps that get longer: short for who has just come, and cheap for the store later."""
    seconds = _SHORTEST_PAUSE

    def pause() -> None:
        nonlocal seconds
        time.sleep(seconds)
        seconds = min(2 * seconds, _LONGEST_PAUSE)

    return pause
