"""The members of a run, as its present job knows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.comm.members.form import JobManager
from deepspeed.comm.members.links import MemberLinks
from deepspeed.comm.members.member import JobPlan


@dataclass
class RunMembership:
    """What outlives a job of a run whose ranks may change.

    Attributes:
        links: To the other members.
        starter: Starts the next job.
        plan: Of the present job.
        elastic: What the engine keeps from job to job; None: there was no engine yet.
    """

    links: MemberLinks
    starter: JobManager
    plan: JobPlan
    elastic: Any = None

    @property
    def is_in_use(self) -> bool:
        """Whether an engine of this process goes on when the ranks change."""
        return self.elastic is not None and bool(self.elastic.is_taken)
