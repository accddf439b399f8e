"""Admission to a rendezvous: before the ranks of a run use a store, each sends the identifier of its run.

Processes of two runs with the same port connect to one store, where rank 1 of one run looks like rank 1 of the other.
So no key that two runs could share is used before rank 0, the host, has checked the processes. Every other process
takes a number, posts its description, and waits for the reply under its number. The host admits one process per rank
and refuses processes of another run: all ranks of that run get the reason, and this run logs a line. Admitted
processes get the prefix of the run's keys, which contains a secret.

Most starters give a run a name (``Place.run``). Where none does, a process of another program on rank 0's machine that
was not started together with it counts as a stranger. If two processes connect as the same rank and nothing decides
between them, all are refused: a run of mixed ranks trains on garbage.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar, get_type_hints

from deepspeed.comm.base.batched_store import (
    MOST_THAT_POLL,
    longest_pause,
    read_many,
    those_there,
    wait_at_store,
    write_many,
)
from deepspeed.comm.base.environment import Place
from deepspeed.comm.start.startup import RankInfo, compare_facts, wait_for_readers
from deepspeed.errors import CommunicationError
from deepspeed.logging import logger, printable
from deepspeed.ports import shortened

_SCOPE = "deepspeed/admission"
_HOST = f"{_SCOPE}/host"
_HOST_PERIOD = 0.25  # seconds between checks of a waiting rank whether rank 0 was restarted
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.002, 0.1
_Made = TypeVar("_Made")
_RANK_ARGUMENT = re.compile(r"^(--?[\w-]*rank)(=\d+)?$")
# How long a process waits that finds a rendezvous which ended without it: the host may be about to call the next one.
_LATE_SECONDS = 5.0
_IMPATIENT_SECONDS = 30.0
_OWN_PORT = (
    "Each run needs a port of its own: set MASTER_PORT (--master_port of `deepspeed`, --master-port of torchrun) to a "
    "free one, the same on all ranks"
)


class StoreLostError(RuntimeError):
    """The store of an earlier attempt has ended while this rank looked for its own."""


@dataclass(frozen=True)
class JoiningProcess:
    """One process that asks for admission."""

    rank: int  # the rank that it claims to be
    world_size: int  # how many it counts
    run: str  # its run, as :attr:`~deepspeed.comm.base.environment.Place.run`
    command: str  # its command line, shortened
    job: str  # the same for all ranks that run the same script with the same arguments
    parent: int  # its parent process
    facts: RankInfo  # what must match
    # whether an agent started it that holds the store and starts ranks again; see
    # :class:`~deepspeed.comm.base.environment.Place`
    has_agent: bool = False

    @classmethod
    def here(cls, place: Place, facts: RankInfo) -> JoiningProcess:
        """Returns the description of this process."""
        command, job = shortened(sys.argv), job_of(sys.argv)
        return cls(place.rank, place.world_size, place.run, command, job, os.getppid(), facts, place.has_agent)

    @classmethod
    def from_json(cls, text: str | bytes) -> JoiningProcess:
        """Reads what :meth:`to_json` wrote.

        Raises:
            ValueError: The text is something else: any process that reaches the store may write to it.
        """
        values = _object(text)
        return _checked(cls, {**values, "facts": _checked(RankInfo, values.get("facts"))})

    def to_json(self) -> str:
        """Returns a dict for the store."""
        return json.dumps(asdict(self))

    @property
    def name(self) -> str:
        """Host, process and job in words."""
        run = f" ({self.run})" if self.run else ""
        what = f"rank {self.rank} of {self.world_size} of `{self.command}`{run}"
        return f"process {self.facts.pid} on host {self.facts.host}, {what}"

    @property
    def process(self) -> tuple[str, int]:
        """Identifies the process among all others."""
        return self.facts.host, self.facts.pid

    def is_related_to(self, other: JoiningProcess) -> bool:
        """Returns whether both were surely started together: by one parent, or one by the other."""
        if self.facts.host != other.facts.host:
            return False
        started_together = self.parent == other.parent and self.parent > 1
        return started_together or self.parent == other.facts.pid or other.parent == self.facts.pid

    def replaces(self, other: JoiningProcess) -> bool:
        """Returns whether an agent started this process in place of ``other``, which it had ended.

        The agents of one run count their restarts separately (torch counts no restart that another agent caused), so
        the counts do not decide it. An agent never runs two processes of one rank, and rank 0 belongs to the agent that
        holds the store.
        """
        one_agent = self.has_agent and other.has_agent and self.facts.host == other.facts.host
        same_place = self.rank == other.rank and self.run == other.run and self.process != other.process
        return one_agent and same_place and (self.run != "" or self.rank == 0 or self.parent == other.parent)


@dataclass(frozen=True)
class RendezvousPoint:
    """One rendezvous at a store. A store may see several: an agent keeps it and starts the ranks again."""

    name: str  # unique among rendezvous
    host: JoiningProcess  # rank 0

    @classmethod
    def from_json(cls, text: str | bytes) -> RendezvousPoint:
        """Reads what :meth:`to_json` wrote.

        Raises:
            ValueError: The text is something else.
        """
        values = _object(text)
        return cls(str(values.get("name")), JoiningProcess.from_json(json.dumps(values.get("host"))))

    def to_json(self) -> str:
        """Returns the text for the store."""
        return json.dumps(asdict(self))

    def key(self, name: str) -> str:
        """Returns the key ``name`` of this rendezvous."""
        return f"{_SCOPE}/{self.name}/{name}"


def _object(text: str | bytes) -> dict[str, Any]:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, found {type(values).__name__}")
    return values


def _checked(cls: type[_Made], values: Any) -> _Made:
    """Makes a dataclass of strings, numbers and dataclasses from JSON; strings lose their control characters.

    Raises:
        ValueError: A value is missing or has another type.
    """
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, found {type(values).__name__}")
    types = get_type_hints(cls)
    found = {name: values[name] for name in types if name in values}
    wrong = [name for name, value in found.items() if type(value) is not types[name]]
    if wrong:
        raise ValueError(f"wrong type of {', '.join(wrong)}")
    try:
        return cls(**{name: printable(value) if isinstance(value, str) else value for name, value in found.items()})
    except TypeError as error:  # a value is missing
        raise ValueError(str(error)) from None


def job_of(words: Sequence[str]) -> str:
    """Returns a digest of a command line without what differs between the ranks of one run."""
    kept = [_RANK_ARGUMENT.sub(r"\1", word) for word in words]
    for number, word in enumerate(kept[:-1]):
        if _RANK_ARGUMENT.fullmatch(word) and kept[number + 1].isdecimal():
            kept[number + 1] = ""
    return hashlib.sha256("\0".join(kept).encode(errors="surrogatepass")).hexdigest()[:16]


def receive_ranks(
    store: Any, joining: JoiningProcess, where: str, timeout: timedelta
) -> tuple[str, list[RankInfo], dict[int, str]]:
    """Runs the rendezvous of one run. All its ranks must call it, with a store that was used for nothing else.

    Processes of other runs may have the store too; ``where`` names it in messages.

    Returns:
        Prefix of the keys of this run; on rank 0 the facts of all ranks, on the others an empty list; and the processes
        of the other ranks of this machine, by rank.

    Raises:
        CommunicationError: This process belongs to another run than the one of this store, the ranks do not match, or
            some did not come.
        StoreLostError: The store was an earlier attempt's and has ended: look for the store of this attempt.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        if joining.rank == 0:
            return _Host(store, joining, where, timeout).receive(deadline)
        prefix, neighbors = _attend(store, joining, where, timeout, deadline)
        return prefix, [], neighbors
    except ValueError as error:
        raise CommunicationError(
            f"{joining.name}: expected the rendezvous of this run at {where}, found something that no rank of this "
            f"version has written ({error}). {_OWN_PORT}. Delete a file that an earlier run has left at init_method"
        ) from error
    except RuntimeError as error:
        if isinstance(error, (CommunicationError, StoreLostError)):
            raise
        raise CommunicationError(
            f"{joining.name}: the store at {where} was lost before all ranks had connected, with the process "
            f"that served it ({error}). Look for the error of rank 0"
        ) from error


# --- rank 0 -----------------------------------------------------------------------------------------------------------


class _Host:
    """Rank 0's part: admits processes."""

    def __init__(self, store: Any, me: JoiningProcess, where: str, timeout: timedelta) -> None:
        self._store = store
        self._me = me
        self._rendezvous = RendezvousPoint(uuid.uuid4().hex, me)
        self._where = where
        self._timeout = timeout
        self._seen = 0
        self._late: set[int] = set()  # numbers of processes that have not posted their description yet
        self._members: dict[int, tuple[int, JoiningProcess]] = {}  # by rank: its number and description
        self._decision: str | None = None

    def receive(self, deadline: float) -> tuple[str, list[RankInfo], dict[int, str]]:
        """Admits the ranks; see :func:`receive_ranks`."""
        self._open()
        pause = _pauses(self._store)
        impatient_at = time.monotonic() + _IMPATIENT_SECONDS
        while True:
            self._look_at_arrivals()
            now = time.monotonic()
            if self._decision is not None or not self._missing():
                break
            if now > deadline:
                self._decision = (
                    f"{self._named_missing()} did not connect to {self._where} within {self._timeout}. Check that all "
                    f"{self._me.world_size} processes were started and can reach that address"
                )
            elif now > impatient_at:
                impatient_at += _IMPATIENT_SECONDS
                logger.warning(f"still waiting at {self._where} for {self._named_missing()}")
            pause("")
        joiners = [self._me, *(self._members[rank][1] for rank in sorted(self._members))]
        self._decision = self._decision or compare_facts([joining.facts for joining in joiners])
        prefix = self._close(joiners)
        if self._decision is not None:
            raise CommunicationError(self._decision)
        neighbors = _by_host(joiners).get(self._me.facts.host, {})
        return prefix, [joining.facts for joining in joiners], _without(neighbors, 0)

    def _open(self) -> None:
        """Opens the rendezvous. Replaces an earlier one if it was this rank's, in this process or before a restart."""
        mine = self._rendezvous.to_json()
        found = _text(self._store.compare_set(_HOST, "", mine))
        if found == mine:
            return
        there = RendezvousPoint.from_json(found)
        is_mine = there.host.process == self._me.process or self._me.replaces(there.host)
        if is_mine and _text(self._store.compare_set(_HOST, found, mine)) == mine:
            return
        _arrive(self._store, there, self._me)  # so that rank 0 of the other run reports it
        raise CommunicationError(_refusal(self._me, there.host, self._where))

    def _key(self, name: str) -> str:
        return self._rendezvous.key(name)

    def _look_at_arrivals(self) -> None:
        count = self._store.add(self._key("arrivals"), 0)
        unknown = [*sorted(self._late), *range(self._seen + 1, count + 1)]
        self._seen = count
        by_key = {self._key(f"arrival/{number}"): number for number in unknown}
        there = those_there(self._store, list(by_key))
        self._late = set(unknown) - {by_key[key] for key in there}
        for key, text in zip(there, read_many(self._store, there), strict=True):
            self._read_arrival(by_key[key], text)

    def _read_arrival(self, number: int, text: bytes) -> None:
        try:
            joining = JoiningProcess.from_json(text)
        except ValueError as error:
            logger.warning(f"{self._where}: ignored a process whose first message this version cannot read: {error}")
            version = f"{self._where} is the rendezvous of a run of deepspeed {self._me.facts.version}; "
            self._answer(number, error=f"{version}it could not read the message of this process. {_OWN_PORT}")
            return
        self._judge(number, joining)

    def _judge(self, number: int, joining: JoiningProcess) -> None:
        me = self._me
        fits = joining.run == me.run and joining.world_size == me.world_size and 0 < joining.rank < me.world_size
        is_another_job = joining.facts.host == me.facts.host and joining.job != me.job
        if not fits or (not me.run and is_another_job and not joining.is_related_to(me)):
            self._refuse(number, joining)
            return
        there = self._members.get(joining.rank)
        if there is None or there[1].process == joining.process or joining.replaces(there[1]):
            self._members[joining.rank] = (number, joining)
            return
        is_ours, was_ours = joining.is_related_to(me), there[1].is_related_to(me)
        if is_ours and not was_ours:
            self._refuse(*there)
            self._members[joining.rank] = (number, joining)
        elif was_ours and not is_ours:
            self._refuse(number, joining)
        else:
            self._answer(number, error=self._dispute(there[1], joining))
            self._decision = self._dispute(there[1], joining)

    def _refuse(self, number: int, joining: JoiningProcess) -> None:
        logger.warning(
            f"{self._where}: refused {joining.name}: it belongs to another run than this one, {self._me.name}. "
            "Nothing needs to be done here; the other run needs a port of its own"
        )
        self._answer(number, error=_refusal(joining, self._me, self._where))

    def _dispute(self, first: JoiningProcess, second: JoiningProcess) -> str:
        return (
            f"two processes connected to {self._where} as the same rank: {first.name}; and {second.name}. "
            "Either a rank was started twice, or two runs use one port, and it is not known which of the two "
            f"belongs to the run of rank 0, {self._me.name}. {_OWN_PORT}; DS_RUN_ID, equal on all processes of "
            "a run, tells runs apart"
        )

    def _missing(self) -> list[int]:
        if len(self._members) == self._me.world_size - 1:
            return []
        return [rank for rank in range(1, self._me.world_size) if rank not in self._members]

    def _named_missing(self) -> str:
        missing = self._missing()
        some = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        return f"{'rank' if len(missing) == 1 else 'ranks'} {some} of {self._me.world_size}"

    def _answer(self, number: int, **answer: str) -> None:
        self._store.set(self._key(f"answer/{number}"), json.dumps(answer))

    def _close(self, joiners: list[JoiningProcess]) -> str:
        """Replies to the admitted processes; returns the prefix of the run's keys."""
        prefix = f"deepspeed/run/{uuid.uuid4().hex}"
        readers = self._store.add(self._key("read"), 0) + len(self._members)
        answer = {"prefix": prefix} if self._decision is None else {"error": self._decision}
        common, hosts = json.dumps(answer), _by_host(joiners) if self._decision is None else {}
        with_processes = {host: json.dumps({**answer, "processes": ranks}) for host, ranks in hosts.items()}
        members = self._members.values()
        answers = {f"answer/{number}": with_processes.get(each.facts.host, common) for number, each in members}
        write_many(self._store, {self._key(name): text for name, text in answers.items()})
        names = {joining.rank: (joining.process, joining.name) for joining in joiners}
        self._store.set(self._key("closed"), json.dumps(names))
        if self._decision is not None:
            wait_for_readers(self._store, self._key("read"), readers)
        return prefix


def _by_host(joiners: Sequence[JoiningProcess]) -> dict[str, dict[int, str]]:
    """Returns the processes of ranks, where they are known, by machine and rank."""
    found: dict[str, dict[int, str]] = {}
    for each in joiners:
        if each.facts.process:
            found.setdefault(each.facts.host, {})[each.rank] = each.facts.process
    return found


def _without(processes: dict[int, str], rank: int) -> dict[int, str]:
    return {other: process for other, process in processes.items() if other != rank}


def _refusal(joining: JoiningProcess, host: JoiningProcess, where: str) -> str:
    """Returns the reply to a process that is not admitted."""
    missing = (
        ". If both are one run, give all its processes the same DS_RUN_ID" if not (joining.run and host.run) else ""
    )
    return (
        f"{where} is the rendezvous of another run, that of {host.name}. It refused this process, "
        f"{joining.name}. {_OWN_PORT}{missing}"
    )


# --- the other ranks --------------------------------------------------------------------------------------------------


def _attend(
    store: Any, joining: JoiningProcess, where: str, timeout: timedelta, deadline: float
) -> tuple[str, dict[int, str]]:
    """Takes part as a rank other than the host; returns the prefix of the run's keys, and the processes beside it.

    Raises:
        StoreLostError: The store ended, and no rendezvous there was open to this rank: it was an earlier attempt's.
    """
    rendezvous: RendezvousPoint | None = None
    number, is_over = 0, False
    pause = _pauses(store, joining.world_size)
    late_at: float | None = None
    look_at = time.monotonic()
    impatient_at = look_at + _IMPATIENT_SECONDS
    try:
        while rendezvous is None or not store.check([rendezvous.key(f"answer/{number}")]):
            now = time.monotonic()
            if rendezvous is None or now > look_at:
                look_at = now + _HOST_PERIOD
                there = RendezvousPoint.from_json(store.get(_HOST)) if store.check([_HOST]) else None
                if there is not None and there != rendezvous:  # the first, or that of a rank 0 that was started again
                    rendezvous, number = there, _arrive(store, there, joining)
                reason = None if rendezvous is None else _is_over_without(store, rendezvous, joining, where)
                is_over = reason is not None
                late_at = None if reason is None else late_at or now + _LATE_SECONDS
                # A finished rendezvous may belong to the attempt before: then rank 0 will open another.
                is_mine = rendezvous is not None and joining.has_agent and rendezvous.host.has_agent
                waits_for_restart = is_mine and rendezvous is not None and rendezvous.host.run == joining.run
                if reason is not None and late_at is not None and now > late_at and not waits_for_restart:
                    raise CommunicationError(reason)
            if now > impatient_at and (rendezvous is None or is_over):
                impatient_at = math.inf  # logged once
                logger.warning(
                    f"{joining.name}: rank 0 has not answered at {where} yet; the store there may belong to another run"
                )
            # If rank 0 runs, its message lists the missing ranks.
            if now > deadline + (_LATE_SECONDS if rendezvous is not None else 0.0):
                raise CommunicationError(
                    f"{joining.name}: nothing came from rank 0 at {where} within {timeout}. Check that all "
                    f"{joining.world_size} processes were started and can reach that address, "
                    "and that no other program holds the port"
                )
            pause(_HOST if rendezvous is None else rendezvous.key(f"answer/{number}"))
        answer = _object(store.get(rendezvous.key(f"answer/{number}")))
    except RuntimeError as error:
        if is_over and not isinstance(error, CommunicationError):
            raise StoreLostError(str(error)) from error
        raise
    if "error" in answer:
        store.add(rendezvous.key("read"), 1)
        raise CommunicationError(printable(str(answer["error"])))
    processes = answer.get("processes", {})
    if not isinstance(processes, dict):
        raise ValueError(f"expected processes by rank, found {type(processes).__name__}")
    return str(answer["prefix"]), _without({int(rank): str(text) for rank, text in processes.items()}, joining.rank)


def _arrive(store: Any, rendezvous: RendezvousPoint, joining: JoiningProcess) -> int:
    """Posts this process's description; returns the number under which the answer will be."""
    number: int = store.add(rendezvous.key("arrivals"), 1)
    store.set(rendezvous.key(f"arrival/{number}"), joining.to_json())
    return number


def _is_over_without(store: Any, rendezvous: RendezvousPoint, joining: JoiningProcess, where: str) -> str | None:
    """Returns why this process is too late; None while the rendezvous is open, or if this process was admitted."""
    if not store.check([rendezvous.key("closed")]):
        return None
    members = _object(store.get(rendezvous.key("closed")))
    if any(tuple(process) == joining.process for process, _ in members.values()):
        return None
    same = members.get(str(joining.rank))
    place = f"; its rank {joining.rank} is {printable(str(same[1]))}" if same is not None else ""
    return (
        f"{where}: another run has used this address already, that of {rendezvous.host.name}{place}. This is "
        f"{joining.name}, which is no part of that run. {_OWN_PORT}. A file that an "
        "earlier run has left at init_method must be deleted"
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _pauses(store: Any, ranks: int = 1) -> Callable[[str], None]:
    """Returns sleeps that get longer: short for who has just come, and cheap for the store later.

    ``ranks`` processes poll the store at the same time. Thousands of them wait there for the key that a sleep is given.
    """
    seconds = _SHORTEST_PAUSE

    def pause(key: str) -> None:
        nonlocal seconds
        if ranks > MOST_THAT_POLL:
            wait_at_store(store, key, ranks)
            return
        time.sleep(seconds)
        seconds = min(2 * seconds, longest_pause(ranks, _LONGEST_PAUSE))

    return pause
