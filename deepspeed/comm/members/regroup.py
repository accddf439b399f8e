"""The agreement of the remaining members on the next job of the run.

The living member with the lowest number leads. Every member sends it a ready message with the copies of model states
that it holds and the members that it has lost; the leader waits for all of them and sends a plan. Whenever a further
member is lost, every member determines the leader again and sends its ready message again: so the death of a leader, or
of several members at once, is no special case. A plan that names a lost member is ignored, and so is a ready message
from before its sender took the last plan: sent again late, it may arrive when that agreement is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed.comm.members.links import MemberLinks, join_key
from deepspeed.comm.members.member import JobPlan, RunMember
from deepspeed.errors import CommunicationError

_NUMBERS_PER_EPOCH = 1 << 20  # numbers are never reused, even if an earlier plan failed
_POLL_SECONDS = 0.5  # how long a member waits for a message before it looks at the links again


@dataclass(frozen=True)
class ReadyMember:
    """The message of a member that is ready for another job."""

    epoch: int  # the epoch of the last plan that it has accepted
    held: list[Any]  # copies that it holds, as ``elasticity.copies`` lists them
    join_requests: list[dict[str, Any]]  # processes that want to join through it


@dataclass(frozen=True)
class MemberSelection:
    """Lists the processes that take part in the next job."""

    members: tuple[RunMember, ...]  # by rank, processes that join included
    spares: tuple[RunMember, ...]  # living members that get no rank
    source: tuple[int, int] | None  # generation and epoch of the copies to continue from; None: the last checkpoint


ChooseMembers = Callable[[Sequence[RunMember], Mapping[int, ReadyMember], Sequence[RunMember]], MemberSelection]
"""Chooses of living members, given with what they hold, and of processes that want to join.

Raises an error that ends the run where nothing is left to continue from.
"""


class Regroup:
    """One agreement on the next job.

    Args:
        links: The links of this process.
        epoch: The epoch of the last plan that this process has taken.
        held: Copies that this process holds.
        choose: Called on the leader.
        served: Numbers of the members that have ranks while this process is a spare; empty: it has one.
        open_store: Opens the store of the next job at an address of the leader, and returns the port.
        patience: The longest wait for the other members, in seconds.
    """

    def __init__(
        self,
        links: MemberLinks,
        epoch: int,
        held: list[Any],
        choose: ChooseMembers,
        open_store: Callable[[str], int],
        patience: float,
        served: frozenset[int] = frozenset(),
    ) -> None:
        self._links = links
        self._mine = ReadyMember(epoch, held, links.join_requests)
        self._choose = choose
        self._open_store = open_store
        self._patience = patience if not served else float("inf")  # a spare may wait arbitrarily long
        self._served = served
        self._ready: dict[int, ReadyMember] = {}
        self._epochs = epoch

    def run(self) -> JobPlan | None:
        """Returns the plan that all members that are left have agreed on. All of them must call it.

        Returns:
            None on a spare, when those with ranks have come to the end of the run.

        Raises:
            CommunicationError: Some did not answer in time, or too few are left to exclude that others continue too.
        """
        deadline = time.monotonic() + self._patience
        announced: tuple[int, ...] = ()
        requested = len(self._mine.join_requests)
        while time.monotonic() < deadline:
            if self._links.is_dropped:
                raise CommunicationError(
                    "elasticity.continue: another rank could not reach this process, so the run continues without it. "
                    "Check the network between the hosts, and start a process again to join"
                )
            if self._served and self._served <= self._links.departed:
                return None
            living = self._links.living
            numbers = tuple(member.number for member in living)
            leader = numbers[0]
            if numbers != announced or (self._served and requested != len(self._links.join_requests)):
                announced = numbers
                self._mine = replace(self._mine, join_requests=self._links.join_requests)
                requested = len(self._mine.join_requests)
                self._refuse_split(living)
                self._ready[self._links.number] = self._mine
                if leader != self._links.number:
                    self._links.send(leader, {"kind": "ready", **vars(self._mine), "lost": sorted(self._links.lost)})
                # A spare reports its join requests to a member with a rank, which then starts a plan with them.
                ranked = next((number for number in numbers if number in self._served), None)
                if ranked is not None:
                    report = {"kind": "joining", "epoch": self._mine.epoch, "count": requested}
                    self._links.send(ranked, report)
            leads = leader == self._links.number and set(numbers) <= self._ready.keys()
            found = self._links.receive(0.0 if leads else _POLL_SECONDS)  # the leader has all earlier messages
            if found is not None:
                plan = self._take(*found)
            else:
                plan = self._lead(living) if leads else None
            if plan is not None:
                return plan
        missing = [member.name for member in self._links.living if member.number not in self._ready]
        raise CommunicationError(
            "elasticity.continue: the members that are left did not agree on another job within "
            f"{self._patience:.0f} s; still missing: {', '.join(missing) or 'the plan of the leader'}. Start "
            "the run again from its last checkpoint"
        )

    def _refuse_split(self, living: Sequence[RunMember]) -> None:
        """Raises without a majority of the former members, if a loss is uncertain, lest two halves both continue."""
        uncertain = [lost.member.name for lost in self._links.lost.values() if not lost.is_certain]
        if uncertain and 2 * len(living) <= len(self._links.members):
            raise CommunicationError(
                f"elasticity.continue: {', '.join(uncertain)} cannot be reached, and the {len(living)} members that "
                f"are left are no majority of {len(self._links.members)}: the others may continue without these. Start "
                "the run again from its last checkpoint"
            )

    def _take(self, sender: int, message: dict[str, Any]) -> JobPlan | None:
        kind = message.get("kind")
        if kind == "ready":
            # Not from before its sender took the plan that this process took last: a member that has not taken that
            # plan has lost a member of it, which the message lists.
            planned = {member.number for member in self._links.members}
            if int(message["epoch"]) < self._mine.epoch and not planned & set(message["lost"]):
                return None
            self._ready[sender] = ReadyMember(int(message["epoch"]), message["held"], message["join_requests"])
            self._epochs = max(self._epochs, int(message["epoch"]))
            for number in message["lost"]:
                self._links.drop(number)
        elif kind == "plan":
            plan = JobPlan.from_json(message["plan"])
            if plan.epoch > self._mine.epoch and not {m.number for m in plan.everybody} & self._links.lost.keys():
                self._accept(plan)
                return plan
        elif kind == "failure":
            raise CommunicationError(str(message["text"]))
        return None

    def _accept(self, plan: JobPlan) -> None:
        mine = {join_key(m.to_json()): m.number for m in plan.members if m.number in plan.newcomers}
        self._links.reply_to_join_requests({"kind": "plan", "plan": plan.to_json()}, mine)
        self._links.settle(plan.everybody, self._links.number, plan.epoch)

    def _lead(self, living: Sequence[RunMember]) -> JobPlan | None:
        """Sends the plan to every rank; None if a member was lost meanwhile."""
        everybody = {member.number: self._ready[member.number] for member in living}
        first = (self._epochs + 1) * _NUMBERS_PER_EPOCH
        join_requests = {join_key(one): one for ready in everybody.values() for one in ready.join_requests}
        joining = [
            RunMember.from_json({**join_request, "number": first + place, "rank": -1})
            for place, join_request in enumerate(join_requests.values())
        ]
        try:
            chosen = self._choose(living, everybody, joining)
        except Exception as error:
            for member in living[1:]:
                self._links.send(member.number, {"kind": "failure", "text": str(error)})
            raise
        if {member.number for member in living} & self._links.lost.keys():
            return None
        newcomers = {member.number for member in joining}
        host = living[0].address[0]
        plan = JobPlan(
            epoch=self._epochs + 1,
            members=chosen.members,
            address=(host, self._open_store(host)),
            source=chosen.source,
            newcomers=tuple(member.number for member in chosen.members if member.number in newcomers),
            spares=chosen.spares,
        )
        for member in living[1:]:
            self._links.send(member.number, {"kind": "plan", "plan": plan.to_json()})
        self._accept(plan)
        return plan
