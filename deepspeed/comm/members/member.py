"""One process of a run whose ranks may change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class RunMember:
    """A process of the run."""

    number: int  # unique in the run; it stays with the process when ranks are renumbered
    rank: int  # its rank in the present job; -1: it has none, or none yet
    host: str  # its machine
    pid: int  # its process
    local_rank: int  # its rank on the machine, which decides about the device
    address: tuple[str, int]  # where it listens for links: host and port
    part: int = 0  # which part of the model it holds: it stays with the process while each part is held by some process

    @property
    def name(self) -> str:
        """Rank, host and process in words."""
        rank = f"rank {self.rank}" if self.rank >= 0 else "a spare process"
        return f"{rank} (host {self.host}, pid {self.pid})"

    def to_json(self) -> dict[str, Any]:
        """Returns a dict for messages."""
        return {**asdict(self), "address": list(self.address)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunMember:
        """Reads what :meth:`to_json` wrote."""
        host, port = values["address"]
        return cls(**{**values, "address": (str(host), int(port))})


@dataclass(frozen=True)
class JobPlan:
    """The next job of a run: who takes part, and where its process group is started."""

    epoch: int  # counts the jobs of the run from 0
    members: tuple[RunMember, ...]  # by rank
    address: tuple[str, int]  # where the member that made the plan holds the store: host and port
    # generation and epoch of the copies that training continues from; None: each rank has its state, or the last
    # checkpoint is loaded
    source: tuple[int, int] | None = None
    newcomers: tuple[int, ...] = ()  # numbers of members that have no state
    spares: tuple[RunMember, ...] = ()  # members of the run that have no rank in this job, and wait for another one

    @property
    def everybody(self) -> tuple[RunMember, ...]:
        """Members with a rank, and spares."""
        return (*self.members, *self.spares)

    def to_json(self) -> dict[str, Any]:
        """Returns a dict for messages."""
        return {
            "epoch": self.epoch,
            "members": [member.to_json() for member in self.members],
            "address": list(self.address),
            "source": None if self.source is None else list(self.source),
            "newcomers": list(self.newcomers),
            "spares": [member.to_json() for member in self.spares],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> JobPlan:
        """Reads what :meth:`to_json` wrote."""
        source = values["source"]
        host, port = values["address"]
        return cls(
            int(values["epoch"]),
            tuple(RunMember.from_json(each) for each in values["members"]),
            (str(host), int(port)),
            None if source is None else (int(source[0]), int(source[1])),
            tuple(int(number) for number in values["newcomers"]),
            tuple(RunMember.from_json(each) for each in values["spares"]),
        )


def numbered(members: Sequence[RunMember], parts: int = 1) -> tuple[RunMember, ...]:
    """Returns the members with the ranks 0, 1, 2, ... in their order; neighboring ranks hold the parts of a model."""
    return tuple(replace(member, rank=rank, part=rank % parts) for rank, member in enumerate(members))
