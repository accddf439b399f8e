"""The state of an elastic run that a process keeps between jobs: members, copies, and costs of recoveries."""

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
    """The timeline of one change of ranks, in seconds, as measured on this rank."""

    step: int  # the interrupted step, or the next one
    ranks: tuple[int, int]  # number of ranks before and after
    lost: tuple[str, ...] = ()  # a message about each lost member
    joined: int = 0  # number of new members
    repeated: int = 0  # updates that are repeated, without the interrupted step
    # from the time at which the links recorded the loss until the training thread noticed; 0 for a join
    detected: float = 0.0
    regrouped: float = 0.0  # until the remaining members had agreed and their process group was made
    rebuilt: float = 0.0  # until the engine was rebuilt
    moved: float = 0.0  # until the engine was filled with model states
    nbytes: int = 0  # bytes of model states that this rank received
    first_step: float = 0.0  # duration of the first step afterwards; 0 until it has ended
    loaded: str | None = None  # the checkpoint that was loaded because copies were lost; None if none was

    @property
    def total(self) -> float:
        """Seconds from the loss until training continued."""
        return self.detected + self.regrouped + self.rebuilt + self.moved


@dataclass
class CopyCost:
    """Cost of the copies on this rank so far."""

    count: int = 0  # number of copies made
    nbytes: int = 0  # bytes copied
    sent: int = 0  # bytes sent to the buddy; 0 if the buddy is on the same host, where it opens the memory itself
    seconds: float = 0.0  # seconds spent on making and sending copies, waits for neighbors included
    processor: float = 0.0  # processor time of this process meanwhile, in seconds
    held: int = 0  # bytes of host memory of its copies and of those of the previous rank, at the latest copy


@dataclass
class ElasticRun:
    """The state of an elastic run in one process, kept between jobs."""

    members: RunMembership  # links and the plan of the present job
    held: CopyStore  # copies of model states
    recoveries: list[Recovery] = field(default_factory=list)  # all changes of the ranks so far
    cost: CopyCost = field(default_factory=CopyCost)  # the cost of the copies
    # the checkpoint folder to load from if copies are lost; None: the last one in ``used``
    checkpoints: str | os.PathLike[str] | None = None
    # checkpoint folders that the run has saved to or loaded from, the latest one last
    used: list[Path] = field(default_factory=list)
    # returns the engine that the copies belong to; None if it no longer exists
    engine: Callable[[], EngineBase | None] = lambda: None
    filled: int = 0  # epoch of the latest plan by which an engine was filled
    lost: list[RunMember] = field(default_factory=list)  # members lost since the latest recovery

    @classmethod
    def of(cls, job: Job) -> ElasticRun | None:
        """Returns the run to which a job belongs; None if there is none yet."""
        found: ElasticRun | None = getattr(job.members, "elastic", None)
        return found

    @property
    def is_taken(self) -> bool:
        """Whether its engine is still in use."""
        engine = self.engine()
        return engine is not None and not engine._runtime.is_destroyed

    def begin_with(self, engine: EngineBase) -> None:
        """Assigns the run to ``engine``; drops copies and records of another engine."""
        if self.engine() is not engine:
            self.held.clear()
            self.recoveries, self.cost, self.checkpoints, self.used = [], CopyCost(), None, []
            self.engine = weakref.ref(engine)


def first_members(job: Job, transport: Transport, parts: int) -> RunMembership:
    """Connects the ranks of a new run whose model has ``parts`` parts. Every rank must call it.

    Raises:
        CommunicationError: This host has no route to MASTER_ADDR.
    """
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    own = address_towards(address)
    if own is None:
        raise CommunicationError(
            f"elasticity.continue: this host has no route to MASTER_ADDR {address}; set an address that all ranks reach"
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
    links.on_loss = waits_give_up(job)
    plan = JobPlan(0, members, members[0].address)
    log_dist(join_line(plan, token))
    ExitNotes.here().continues()
    return RunMembership(links, JobManager(links), plan)


def join_line(plan: JobPlan, token: str) -> str:
    """Returns a log line with the environment variable that makes a process join the run."""
    host, port = plan.members[0].address
    return f"elastic: a process may join this run with {JOIN}={host}:{port}/{token}"
