"""Ends the job of former members and starts that of a plan, in the same process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from deepspeed.comm.base.device import default_backend, local_device, serves_host_only, start_world_group
from deepspeed.comm.base.timeout import default_timeout
from deepspeed.comm.job.job import Job
from deepspeed.comm.members.links import LostMember, MemberLinks
from deepspeed.comm.members.member import JobPlan
from deepspeed.errors import CommunicationError
from deepspeed.ports import is_listening

_FORM_SECONDS = 60.0  # for the start of a process group among processes that are all running
_CONNECT_SECONDS = 2.0
# Gloo cannot be interrupted where a member dies while it connects: it waits so long for a key of the store, and five
# times as long for a connection.
_GLOO_SECONDS = 6.0
_RETRY_SECONDS = 0.02


def waits_give_up(job: Job) -> Callable[[LostMember], None]:
    """Returns what makes the waits of a job raise when a member is lost."""
    watch = job.watched.watch
    watch.hears_losses = True

    def give_up(lost: LostMember) -> None:
        cause = lost.cause or "its process has ended, or its machine does not answer"
        watch.give_up(
            f"{lost.member.name} was lost: {cause}. With "
            "elasticity.continue the other ranks continue inside `with step:` of deepspeed.elasticity.ElasticSteps"
        )

    return give_up


class JobManager:
    """Starts the process groups of a run whose ranks change, one after the other."""

    def __init__(self, links: MemberLinks) -> None:
        self._links = links
        self._served: Any = None  # the store of the present job, if this process has planned it
        self._next: Any = None  # the store of the next job

    def open_store(self, host: str) -> int:
        """Opens a store for the next job, which this process has planned; returns the port."""
        self._next = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_FORM_SECONDS)
        )
        return int(self._next.port)

    def end_job(self) -> None:
        """Destroys the process group there is; no other rank needs to come. Communicators that hang are aborted."""
        job = Job.adopt()
        if dist.is_initialized():
            if not serves_host_only(dist.get_backend()):
                distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()
        job.close()

    def start_job(self, plan: JobPlan) -> Job:
        """Starts the process group of ``plan``, and opens its job. All its members must call it.

        Raises:
            CommunicationError: A member was lost, or did not arrive in time.
        """
        me = next(member for member in plan.members if member.number == self._links.number)
        self._links.on_loss = self._break_off
        try:
            self._links.connect(_FORM_SECONDS)
            os.environ.update(
                RANK=str(me.rank),
                WORLD_SIZE=str(len(plan.members)),
                LOCAL_WORLD_SIZE=str(sum(member.host == me.host for member in plan.members)),
                MASTER_ADDR=plan.address[0],
                MASTER_PORT=str(plan.address[1]),
            )
            store = self._reach(plan)
            backend = default_backend()
            start_world_group(
                backend,
                None if serves_host_only(backend) else local_device(),
                store=dist.PrefixStore(f"epoch{plan.epoch}", store),
                rank=me.rank,
                world_size=len(plan.members),
                timeout=timedelta(seconds=_GLOO_SECONDS),
            )
            distributed_c10d._set_pg_timeout(default_timeout())
            store.set_timeout(default_timeout())
            job = Job.open()
            job.watched.begin()
        except (RuntimeError, OSError) as error:
            self._next = None
            if isinstance(error, CommunicationError):
                raise
            raise CommunicationError(
                f"the process group of {len(plan.members)} ranks could not be started: {error}"
            ) from error
        self._served, self._next = self._next, None
        self._links.on_loss = waits_give_up(job)
        if self._links.lost:  # before any member has been notified
            raise CommunicationError("a member was lost while the process group was started")
        return job

    def stand_by(self) -> None:
        """Stays out of the planned job, but keeps its store open if this process has opened it."""
        self._links.on_loss = self._break_off
        if self._links.lost:
            self._next = None

    def _break_off(self, _lost: LostMember) -> None:
        """Drops the store after a member was lost during the start, so that no rank waits for that member."""
        self._next = None

    def _reach(self, plan: JobPlan) -> Any:
        """Returns the store of ``plan``.

        Who holds it drops it when a member is lost, perhaps between the look and the connection, for which torch would
        try again until its time limit; so that limit is short.
        """
        host, port = plan.address
        deadline = time.monotonic() + _FORM_SECONDS
        while not self._links.lost and time.monotonic() < deadline:
            if not is_listening(host, port):
                time.sleep(_RETRY_SECONDS)
                continue
            try:
                store = dist.TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_SECONDS)
                )
            except RuntimeError:  # it was there a moment ago
                continue
            store.set_timeout(timedelta(seconds=_FORM_SECONDS))
            return store
        raise CommunicationError(f"the store of the process group does not answer at {host}:{port}")
