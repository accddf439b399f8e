"""Chooses the processes of a run that get ranks, when they hold different parts of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice, product

from deepspeed.comm.members.member import RunMember, numbered
from deepspeed.comm.members.regroup import MemberSelection, ReadyMember
from deepspeed.elasticity.copies import newest_whole
from deepspeed.errors import CommunicationError

_MOST_CHOICES = 512  # sets of members that are tried
_MOST_OF_A_PART = 32  # sets of members of one part that are tried


@dataclass(frozen=True)
class RunShape:
    """Constraints on the ranks of the jobs of a run."""

    # Number of parts of the model; consecutive ranks hold different parts. A process keeps its part as long as each of
    # the other parts has a process.
    parts: int = 1
    multiple: int = 1  # the number of ranks that hold a part must be a multiple of this (the sequence-parallel size)
    # number of consecutive ranks that share layers (the tensor-parallel size) and draw the same random numbers
    sharing: int = 1

    def replicas(self, counts: Sequence[int]) -> int:
        """Returns the number of ranks per part in the largest possible job, given the processes of each part."""
        return min(counts) // self.multiple * self.multiple

    def choose(
        self,
        living: Sequence[RunMember],
        ready: Mapping[int, ReadyMember],
        joining: Sequence[RunMember],
    ) -> MemberSelection:
        """Chooses the members that get a rank: as many as possible, and of these those with the newest copies.

        Args:
            living: Living members of the run.
            ready: The copies that they hold, by number.
            joining: Processes with a join request; only those that allow a larger job are admitted.

        Raises:
            CommunicationError: There are too few living members for the whole model.
        """
        by_part = [[member for member in living if member.part == part] for part in range(self.parts)]
        counts = list(map(len, by_part))
        present = self.replicas(counts)
        if present == 0:
            return self._assign_again(living, by_part)
        replicas = present
        while sum(max(replicas + self.multiple - count, 0) for count in counts) <= len(joining):
            replicas += self.multiple
        newest = newest_whole(living, ready)
        chosen, source = self._best(by_part, replicas, ready, newest)
        if source is None and replicas > present:  # joining processes need copies to start from
            chosen, source = self._best(by_part, present, ready, newest)
            replicas = present
        rest = iter(joining)
        filled = [[*members, *islice(rest, replicas - len(members))] for members in chosen]
        members = numbered([filled[part][place] for place in range(replicas) for part in range(self.parts)], self.parts)
        ranked = {member.number for member in members}
        return MemberSelection(members, spares_of(living, ranked), source)

    def _assign_again(self, living: Sequence[RunMember], by_part: Sequence[Sequence[RunMember]]) -> MemberSelection:
        """Assigns new parts to as few processes as possible. A checkpoint must be loaded, as no copies are complete."""
        replicas = len(living) // self.parts // self.multiple * self.multiple
        if replicas == 0:
            raise CommunicationError(self._too_few_message(list(map(len, by_part))))
        ordered = [sorted(members, key=lambda one: (one.rank < 0, one.rank)) for members in by_part]
        kept = [members[:replicas] for members in ordered]
        rest = iter([one for members in ordered for one in members[replicas:]])
        filled = [[*members, *islice(rest, replicas - len(members))] for members in kept]
        members = numbered([filled[part][place] for place in range(replicas) for part in range(self.parts)], self.parts)
        return MemberSelection(members, spares_of(living, {member.number for member in members}), None)

    def _best(
        self,
        by_part: Sequence[Sequence[RunMember]],
        replicas: int,
        ready: Mapping[int, ReadyMember],
        newest: tuple[int, int] | None,
    ) -> tuple[list[list[RunMember]], tuple[int, int] | None]:
        """Returns the first choice with complete newest copies, or else the one with the newest; and their key."""
        best: list[list[RunMember]] = []
        source: tuple[int, int] | None = None
        for choice in islice(self._choices(by_part, replicas), _MOST_CHOICES):
            found = newest_whole([member for members in choice for member in members], ready)
            if not best or (found or (-1, -1)) > (source or (-1, -1)):
                best, source = choice, found
            if source == newest:
                break
        return best, source

    def _choices(self, by_part: Sequence[Sequence[RunMember]], replicas: int) -> Iterator[list[list[RunMember]]]:
        """Yields lists of members by part, first members of replicas that have lost no rank."""
        here = {member.rank for members in by_part for member in members if member.rank >= 0}

        def key(member: RunMember) -> tuple[bool, bool, int]:
            neighbors = range(member.rank // self.parts * self.parts, (member.rank // self.parts + 1) * self.parts)
            return member.rank < 0, not here.issuperset(neighbors), member.rank

        ordered = [sorted(members, key=key) for members in by_part]
        sizes = [min(replicas, len(members)) for members in ordered]
        lists = [
            islice(combinations(members, size), _MOST_OF_A_PART) for members, size in zip(ordered, sizes, strict=True)
        ]
        for picked in product(*lists):
            yield [sorted(members, key=lambda member: (member.rank < 0, member.rank)) for members in picked]

    def _too_few_message(self, counts: Sequence[int]) -> str:
        few = [f"{count} of part {part}" for part, count in enumerate(counts) if count < self.multiple]
        return (
            f"elasticity.continue: expected at least {self.multiple} living process(es) for each of the {self.parts} "
            f"part(s) of the model, which tensor- or expert-parallel ranks hold, found {', '.join(few)}, and "
            f"{sum(counts)} process(es) in all. They are too few to hold the whole model. Start the run again from its "
            "last checkpoint"
        )


def spares_of(living: Sequence[RunMember], ranked: set[int]) -> tuple[RunMember, ...]:
    """Returns the members whose numbers are not in ``ranked``, without a rank."""
    return tuple(replace(member, rank=-1) for member in living if member.number not in ranked)
