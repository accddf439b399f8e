"""What a process keeps of an elastic run from job to job: members, copies, and what changes of ranks have cost."""

from __future__ import annotations

import os
import secrets
import socket
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed.comm.job.job import Job
from deepspeed.comm.members.form import JobManager, waits_give_up
from deepspeed.comm.members.join import JOIN, RunMembership
from deepspeed.comm.members.links import MemberLinks
from deepspeed.comm.members.member import JobPlan, RunMember
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.comm.transports.transport import Transport
from deepspeed.elasticity.copies import CopyStore
from deepspeed.engine.engine import EngineBase
from deepspeed.errors import CommunicationError
from deepspeed.exit_notes import ExitNotes
from deepspeed.logging import log_dist
from deepspeed.ports import address_towards


@dataclass
class Recovery:
    """The time line of one change of the ranks, in seconds, as this rank saw it.

    Attributes:
        step: The step that was under way, or is the next one.
        ranks: Before and after.
        lost: Who is gone, in words.
        joined: How many members are new.
        repeated: Updates that are done again besides the step that was under way.
        detected: From the loss, as the links saw it, until this rank's training thread knew; 0 for a join.
        regrouped: Until the members that are left had agreed and their process group stood.
        rebuilt: Until the engine was rebuilt.
        moved: Until the model states were in place.
        nbytes: Bytes of model states that came to this rank.
        first_step: Duration of the first step afterwards; 0 until it is over.
        loaded: The checkpoint that was loaded, as no copies were left; None: none was.
    """

    step: int
    ranks: tuple[int, int]
    lost: tuple[str, ...] = ()
    joined: int = 0
    repeated: int = 0
    detected: float = 0.0
    regrouped: float = 0.0
    rebuilt: float = 0.0
    moved: float = 0.0
    nbytes: int = 0
    first_step: float = 0.0
    loaded: str | None = None

    @property
    def total(self) -> float:
        """Seconds from the loss until training continues."""
        return self.detected + self.regrouped + self.rebuilt + self.moved


@dataclass
class CopyCost:
    """Cost of the copies on this rank so far.

    Attributes:
        count: How many it has made.
        nbytes: Their bytes.
        sent: Those of them that were sent to the buddy; it opens memory of its own host itself.
        seconds: Spent in making and sending them, waits for neighbours included.
        processor: Processor time of this process meanwhile, in seconds.
        held: Bytes of host memory that its copies, and those of the rank before, have now.
    """

    count: int = 0
    nbytes: int = 0
    sent: int = 0
    seconds: float = 0.0
    processor: float = 0.0
    held: int = 0


@dataclass
class ElasticRun:
    """Holds what one process keeps from job to job.

    Attributes:
        members: Links and the plan of the present job.
        held: Copies of model states.
        recoveries: All changes of the ranks so far.
        cost: The cost of the copies.
        checkpoints: The folder to go back to where copies are gone with their owners; None: the last one in ``used``.
        used: Folders that the run has saved to or loaded from, the last one last.
        engine: Whose states these are; None: it is gone.
        filled: Epoch of the last plan by which an engine was filled.
        lost: Members that were lost since then.
    """

    members: RunMembership
    held: CopyStore
    recoveries: list[Recovery] = field(default_factory=list)
    cost: CopyCost = field(default_factory=CopyCost)
    checkpoints: str | os.PathLike[str] | None = None
    used: list[Path] = field(default_factory=list)
    engine: Callable[[], EngineBase | None] = lambda: None
    filled: int = 0
    lost: list[RunMember] = field(default_factory=list)

    @classmethod
    def present(cls) -> ElasticRun | None:
        """Returns that of this process; None: there is none yet."""
        found: ElasticRun | None = getattr(Job.current().members, "elastic", None)
        return found

    @property
    def is_taken(self) -> bool:
        """Whether its engine is still in use."""
        engine = self.engine()
        return engine is not None and not engine._train_step.is_destroyed

    def begin_with(self, engine: EngineBase) -> None:
        """Belongs to ``engine`` from now on. Copies of another one's states are forgotten."""
        if self.engine() is not engine:
            self.held.clear()
            self.recoveries, self.cost, self.checkpoints, self.used = [], CopyCost(), None, []
            self.engine = weakref.ref(engine)


def first_members(transport: Transport, parts: int) -> RunMembership:
    """Links the ranks of a run that begins, whose model has this many parts. Every rank must call it.

    Raises:
        CommunicationError: There is no route to MASTER_ADDR.
    """
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    own = address_towards(address)
    if own is None:
        raise CommunicationError(
            f"elasticity.continue: there is no route to MASTER_ADDR {address}; set one that all reach"
        )
    token = gather_objects(transport, secrets.token_hex(16), label="linking the ranks")[0]
    links = MemberLinks(own, token)
    here = RunMember(
        transport.rank, transport.rank, socket.gethostname(), os.getpid(), int(os.environ.get("LOCAL_RANK", "0")),
        links.address, transport.rank % parts,
    )  # fmt: skip
    members = tuple(gather_objects(transport, here, label="linking the ranks"))
    links.settle(members, transport.rank)
    links.connect(60.0)
    links.on_loss = waits_give_up(Job.current())
    plan = JobPlan(0, members, members[0].address)
    log_dist(invitation(plan, token))
    ExitNotes.here().continues()
    return RunMembership(links, JobManager(links), plan)


def invitation(plan: JobPlan, token: str) -> str:
    """Returns the line that shows how a process joins the run."""
    host, port = plan.members[0].address
    return f"elastic: a process may join this run with {JOIN}={host}:{port}/{token}"
