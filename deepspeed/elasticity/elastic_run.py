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
    """The timeline of one change of ranks, in seconds, as measured on this rank.

    Attributes:
        step: The interrupted step, or the next one.
        ranks: Number of ranks before and after.
        lost: A message about each lost member.
        joined: Number of new members.
        repeated: Updates that are repeated, without the interrupted step.
        detected: From the time at which the links recorded the loss until the training thread noticed; 0 for a join.
        regrouped: Until the remaining members had agreed and their process group was made.
        rebuilt: Until the engine was rebuilt.
        moved: Until the engine was filled with model states.
        nbytes: Bytes of model states that this rank received.
        first_step: Duration of the first step afterwards; 0 until it has ended.
        loaded: The checkpoint that was loaded because copies were lost; None if none was.
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
        """Seconds from the loss until training continued."""
        return self.detected + self.regrouped + self.rebuilt + self.moved


@dataclass
class CopyCost:
    """Cost of the copies on this rank so far.

    Attributes:
        count: Number of copies made.
        nbytes: Bytes copied.
        sent: Bytes sent to the buddy; 0 if the buddy is on the same host, where it opens the memory itself.
        seconds: Seconds spent on making and sending copies, waits for neighbors included.
        processor: Processor time of this process meanwhile, in seconds.
        held: Bytes of host memory of its copies and of those of the previous rank, at the latest copy.
    """

    count: int = 0
    nbytes: int = 0
    sent: int = 0
    seconds: float = 0.0
    processor: float = 0.0
    held: int = 0


@dataclass
class ElasticRun:
    """The state of an elastic run in one process, kept between jobs.

    Attributes:
        members: Links and the plan of the present job.
        held: Copies of model states.
        recoveries: All changes of the ranks so far.
        cost: The cost of the copies.
        checkpoints: The checkpoint folder to load from if copies are lost; None: the last one in ``used``.
        used: Checkpoint folders that the run has saved to or loaded from, the latest one last.
        engine: Returns the engine that the copies belong to; None if it no longer exists.
        filled: Epoch of the latest plan by which an engine was filled.
        lost: Members lost since the latest recovery.
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
        """Returns the run of this process; None if there is none yet."""
        found: ElasticRun | None = getattr(Job.current().members, "elastic", None)
        return found

    @property
    def is_taken(self) -> bool:
        """Whether its engine is still in use."""
        engine = self.engine()
        return engine is not None and not engine._train_step.is_destroyed

    def begin_with(self, engine: EngineBase) -> None:
        """Assigns the run to ``engine``; drops copies and records of another engine."""
        if self.engine() is not engine:
            self.held.clear()
            self.recoveries, self.cost, self.checkpoints, self.used = [], CopyCost(), None, []
            self.engine = weakref.ref(engine)


def first_members(transport: Transport, parts: int) -> RunMembership:
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
    links.on_loss = waits_give_up(Job.current())
    plan = JobPlan(0, members, members[0].address)
    log_dist(join_line(plan, token))
    ExitNotes.here().continues()
    return RunMembership(links, JobManager(links), plan)


def join_line(plan: JobPlan, token: str) -> str:
    """Returns a log line with the environment variable that makes a process join the run."""
    host, port = plan.members[0].address
    return f"elastic: a process may join this run with {JOIN}={host}:{port}/{token}"
