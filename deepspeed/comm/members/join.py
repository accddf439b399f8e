"""How a new process joins a run: it sends a request to a member, and becomes a rank at a step boundary."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from deepspeed.comm.base.timeout import default_timeout
from deepspeed.comm.members.form import JobManager
from deepspeed.comm.members.links import MemberLinks
from deepspeed.comm.members.member import JobPlan, RunMember
from deepspeed.errors import CommunicationError
from deepspeed.logging import log_dist
from deepspeed.ports import address_towards

JOIN = "DEEPSPEED_ELASTIC_JOIN"
"""Environment variable of a process that joins a run: ``host:port/token``, as the run's first lines give it."""


@dataclass
class RunMembership:
    """Holds what outlives a job, in a run whose ranks may change."""

    links: MemberLinks  # to the other members
    starter: JobManager  # starts the next job
    plan: JobPlan  # the plan of the present job
    elastic: Any = None  # what the engine keeps from job to job; None: there was no engine yet

    @property
    def is_in_use(self) -> bool:
        """Whether an engine of this process continues when the ranks change."""
        return self.elastic is not None and bool(self.elastic.is_taken)

    @property
    def awaits_copies(self) -> bool:
        """Whether the ranks have changed, and the engine has not been filled from copies since."""
        return self.plan.epoch > 0 and (self.elastic is None or self.elastic.filled != self.plan.epoch)


def join_run(where: str) -> None:
    """Sends a join request to the member at ``where``, waits for the next step boundary, and starts the job there.

    Raises:
        CommunicationError: No member replies there, or the run ended first.
    """
    place, _, token = where.rpartition("/")
    host, _, port = place.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536 and token):
        raise CommunicationError(f"{JOIN}: expected host:port/token as rank 0 of the run printed it, found {where!r}")
    own_host = address_towards(host)
    if own_host is None:
        raise CommunicationError(f"{JOIN}: there is no route to {host}; give an address that this machine can reach")
    links = MemberLinks(own_host, token)
    me = RunMember(-1, -1, socket.gethostname(), os.getpid(), int(os.environ.get("LOCAL_RANK", "0")), links.address)
    try:
        peer, answer, rest = _request_join((host, int(port)), token, me, where)
    except CommunicationError:
        links.close()
        raise
    plan = JobPlan.from_json(answer["plan"])
    links.settle(plan.everybody, int(answer["number"]), plan.epoch)
    links.adopt(peer, int(answer["sender"]), rest)
    starter = JobManager(links)
    starter.start_job(plan).members = RunMembership(links, starter, plan)
    log_dist(f"joined a run: rank {os.environ['RANK']} of {len(plan.members)}", ranks=[-1])


def _request_join(
    place: tuple[str, int], token: str, me: RunMember, where: str
) -> tuple[socket.socket, dict[str, Any], bytes]:
    """Returns the connection to a member, its answer with the plan, and the bytes that came after the answer."""
    patience = default_timeout().total_seconds()
    deadline = time.monotonic() + patience
    try:
        peer = socket.create_connection(place, timeout=patience)
        peer.sendall(json.dumps({"kind": "join_request", "token": token, "member": me.to_json()}).encode() + b"\n")
        received = b""
        while b"\n" not in received and time.monotonic() < deadline:
            data = peer.recv(1 << 16)
            if not data:
                raise OSError("the run closed the connection")
            received += data
        line, _, rest = received.partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"found {type(message).__name__} instead of a message")
    except (OSError, ValueError) as error:  # another program may listen there
        raise CommunicationError(
            f"{JOIN}={where.rpartition('/')[0]}: could not join ({error}). Check that the run still continues and that "
            "the address and the token are those that its rank 0 printed last"
        ) from error
    if message.get("kind") != "plan":
        raise CommunicationError(f"{JOIN}: the run came to its end before this process could join")
    return peer, message, rest
