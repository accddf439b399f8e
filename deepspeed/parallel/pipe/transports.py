"""The connections between the stages of one pipeline: over gloo by tags, elsewhere by a communicator per direction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepspeed import comm
from deepspeed.axes import PIPE
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.job.job import Job, rank_in
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.connect import open_message_queue
from deepspeed.comm.transports.transport import job_is_over, start_p2p
from deepspeed.comm.watch.watched_group import ShortMessages, WatchedGroup
from deepspeed.parallel.pipe.channel import (
    ACTIVATIONS,
    GRADIENTS,
    HEADERS,
    TENSORS,
    ChannelReceiver,
    ChannelSender,
    Route,
)

_TAGS = (1 << 30) + (1 << 28)  # above those of transports
_OWNERS = 8
_KINDS = (ACTIVATIONS, GRADIENTS)
_OTHER = {ACTIVATIONS: GRADIENTS, GRADIENTS: ACTIVATIONS}


@dataclass(frozen=True)
class _Tagged:
    """One channel over gloo: the same two ranks have others, so it has tags of its own."""

    group: Any
    peer: int
    tag: int
    posts_tensors_ahead: bool = True

    def send(self, tensor: torch.Tensor, what: int) -> Any:
        return start_p2p(self.group.send, tensor, self.peer, self.tag + what)

    def receive(self, tensor: torch.Tensor, what: int) -> Any:
        return start_p2p(self.group.recv, tensor, self.peer, self.tag + what)

    def has_left(self, work: Any, what: int) -> bool:
        return True

    def has_come(self, work: Any, what: int) -> bool:
        return False


@dataclass(frozen=True)
class _QueuedMessage:
    """A header or packet that is to come into ``buffer``, 1-D bytes."""

    queue: ShortMessages
    peer: int
    tag: int
    buffer: torch.Tensor

    def wait(self) -> None:
        self.queue.take(self.peer, self.tag, self.buffer.numpy().data)

    def has_come(self) -> bool:
        return self.queue.take_if_there(self.peer, self.tag, self.buffer.numpy().data)


@dataclass(frozen=True)
class _QueueTransport:
    """One channel between ranks of one host: headers and packets, which are short, go through a message queue."""

    queue: ShortMessages
    host: _Tagged
    posts_tensors_ahead: bool = True

    def send(self, tensor: torch.Tensor, what: int) -> Any:
        if what != HEADERS:
            return self.host.send(tensor, what)
        self.queue.post(self.host.peer, self.host.tag, tensor.numpy().data)
        return None

    def receive(self, tensor: torch.Tensor, what: int) -> Any:
        if what != HEADERS:
            return self.host.receive(tensor, what)
        return _QueuedMessage(self.queue, self.host.peer, self.host.tag, tensor)

    def has_left(self, work: Any, what: int) -> bool:
        return True

    def has_come(self, work: Any, what: int) -> bool:
        return what == HEADERS and work.has_come()


@dataclass(frozen=True)
class _Ordered:
    """One channel over a backend without tags, which has communicators of its own; headers go over the host."""

    group: Any
    host: _Tagged | _QueueTransport
    peer: int
    posts_tensors_ahead: bool = False

    def send(self, tensor: torch.Tensor, what: int) -> Any:
        return start_p2p(self.group.send, tensor, self.peer, 0) if what == TENSORS else self.host.send(tensor, what)

    def receive(self, tensor: torch.Tensor, what: int) -> Any:
        return start_p2p(self.group.recv, tensor, self.peer, 0) if what == TENSORS else self.host.receive(tensor, what)

    def has_left(self, work: Any, what: int) -> bool:
        return what != TENSORS or bool(work.is_completed())

    def has_come(self, work: Any, what: int) -> bool:
        return what != TENSORS and self.host.has_come(work, what)


class StageTransports:
    """The channels of this rank's stage. Every rank of the job must make it.

    Args:
        mesh: The ranks.
        device: Where the model computes.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._device = device
        rank, job = rank_in(), Job.current()
        self._ranks = mesh.group(rank, PIPE)
        self.stage = mesh.position(rank, PIPE)
        self._out: dict[tuple[str, int], ChannelSender] = {}
        self._in: dict[tuple[str, int], ChannelReceiver] = {}
        self._native: dict[tuple[str, bool], Any] = {}
        self._queue: ShortMessages | None = None
        if len(self._ranks) == 1:
            return
        timeout, pipes = comm.default_timeout(), mesh.groups(PIPE)
        # Transfers have tags, and a group of its own has threads of its own: all ranks share that of the job.
        why = "transfers between stages"
        self._axis: Axis | None = job.axis_over(pipes, PIPE, why=why, device=device, timeout=timeout, backend="gloo")
        watched = self._axis.watched
        assert watched is not None
        self._watched: WatchedGroup | None = watched
        self._owner = watched.watch.next_owner(f"{watched.scope}stages")
        backend = job.ranks.backend_for(job.ranks.world, device)
        if backend != "gloo":
            # What goes up and what goes down must not wait for each other in one stream.
            for kind in _KINDS:
                for upwards in (True, False):
                    why = f"{kind} between stages, {'up' if upwards else 'down'}"
                    self._native[kind, upwards] = job.process_groups.mine(
                        pipes, backend=backend, timeout=timeout, why=why, owner="job"
                    )
        # Copying into a packet is worth it where tensors are on the host and are sent as headers do.
        self._packs = not self._native and device.type == "cpu"
        # Code that has the group has opened it already; requested here, as every rank of a pipeline is.
        self._queue = open_message_queue(job.connector.over(self._axis.group, None))
        watched.watch.members.add(self)

    def connect_pairs(self, stage_of: Sequence[int]) -> None:
        """Makes the communicators between this stage and its neighbours. Every rank of the pipeline must call it.

        NCCL makes a communicator of two ranks at their first transfer, which blocks the host until both have come to
        it; in the middle of a step that can be a cycle. Here all ranks go through the pairs in one order.

        Args:
            stage_of: The stage of each chunk of the model.
        """
        if len(self._ranks) == 1 or not self._native:
            return
        ways: dict[tuple[str, int, int], None] = {}  # in one order on all ranks, each once
        for below, above in zip(stage_of, stage_of[1:], strict=False):
            if below != above:
                ways |= {(ACTIVATIONS, below, above): None, (GRADIENTS, above, below): None}
        for kind, source, target in ways:
            if self.stage in (source, target):
                self._connect_pair(kind, source, target)

    def _connect_pair(self, kind: str, source: int, target: int) -> None:
        route, transport = self._connect(kind, source, target)
        transfer = transport.send if source == self.stage else transport.receive
        tensor = torch.zeros(1, dtype=torch.uint8, device=self._device)
        label = f"the connection for {kind} from stage {source} to stage {target}"
        route.watched.guard(
            lambda: transfer(tensor, TENSORS).wait(), route.issue(), label, members=route.ranks, axis=PIPE
        )

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Runs one schedule of all stages inside the context: what is sent in it is received in it.

        A communicator in which that failed on some rank is used by no later engine.
        """
        with ExitStack() as rows:
            for group in self._native.values():
                watched = Job.current().watched.of(group)
                assert watched is not None
                rows.enter_context(watched.row("batch"))
            yield

    def leave(self) -> None:
        """Drops process groups and sent tensors at the end of the job, so that no remaining reference keeps them."""
        self._in.clear()
        self._out.clear()
        self._native.clear()
        self._axis = self._watched = self._queue = None

    def outgoing(self, kind: str, stage: int) -> ChannelSender:
        """Returns the channel that carries ``kind`` to another stage."""
        if (kind, stage) not in self._out:
            route, transport = self._connect(kind, self.stage, stage)
            self._out[kind, stage] = ChannelSender(
                route, transport, packs=self._packs, taken=partial(self._taken_from, _OTHER[kind], stage)
            )
        return self._out[kind, stage]

    def incoming(self, kind: str, stage: int) -> ChannelReceiver:
        """Returns the channel that carries ``kind`` from another stage."""
        if (kind, stage) not in self._in:
            route, transport = self._connect(kind, stage, self.stage)
            self._in[kind, stage] = ChannelReceiver(
                route,
                transport,
                self._device,
                packs=self._packs,
                let_go=partial(self._have_been_taken, _OTHER[kind], stage),
            )
        return self._in[kind, stage]

    def _taken_from(self, kind: str, stage: int) -> int:
        known = self._in.get((kind, stage))
        return 0 if known is None else known.taken

    def _have_been_taken(self, kind: str, stage: int, count: int) -> None:
        if (known := self._out.get((kind, stage))) is not None:
            known.let_go(count)

    @property
    def kept(self) -> int:
        """Messages of this rank that may not have left yet."""
        return sum(channel.kept for channel in self._out.values())

    def drain(self) -> None:
        """Waits until everything sent has left."""
        for channel in self._out.values():
            channel.drain()
        if self._queue is not None and self._queue.has_unsent:
            assert self._watched is not None
            # No rank must issue anything for that, and a rank that has not read yet is only late: no rank is waited
            # for.
            label = "free space for messages to other stages"
            self._watched.guard(self._queue.flush, self._watched.issue("queue"), label, members=(), axis=PIPE)

    def _connect(self, kind: str, source: int, target: int) -> tuple[Route, Any]:
        if self._watched is None or self._axis is None:
            raise job_is_over(f"{kind} between stages")
        peer = target if source == self.stage else source
        ranks = (self._ranks[source], self._ranks[target])
        route = Route(kind, source, target, ranks, self._watched, self._owner)
        place = self._axis.members.index(self._ranks[peer])
        number = self._owner % _OWNERS * len(_KINDS) + _KINDS.index(kind)
        tagged = _Tagged(self._axis.group, place, _TAGS + 3 * number)
        transport = tagged if self._queue is None else _QueueTransport(self._queue, tagged)
        if not self._native:
            return route, transport
        return route, _Ordered(self._native[kind, source < target], transport, place)


def connect_stages(mesh: Mesh, device: torch.device) -> StageTransports:
    """Returns the channels of this rank's stage. Every rank of the job must call it.

    Args:
        mesh: The mesh of the job.
        device: Where the model computes.
    """
    made: StageTransports = Job.current().make(StageTransports, mesh, device)
    return made
