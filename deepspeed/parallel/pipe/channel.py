"""Channels between stages: send any nested values, numbered, without shapes agreed in advance.

A *channel* carries one kind of message (activations, gradients) in one direction between two stages, in the order of
the schedule. A message is a *header* (its micro-batch, the length of the description where that has changed, how many
messages the sender has received in the other direction), the description where it has changed, and the tensors. Small
tensors are packed with the header; others are sent separately, without a copy.

Receives are posted ahead: headers and packets for the next two messages, as no computation should wait for these, other
tensors for the next message only, as their buffers are large. Both sides derive from the earlier messages which
receives are posted: those of the layout of the message two before, if its predecessor had the same. The tensors of a
message with another layout are sent separately, and zeros complete the posted receives, which cannot be cancelled.
Sends never block; their tensors are kept alive until they are sent.

:class:`StageChannels` has all channels of a stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from deepspeed import comm
from deepspeed.axes import PIPE
from deepspeed.comm.base.counters import traffic
from deepspeed.comm.base.encoding import decode, encode
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.job.connect import open_message_queue
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.transport import job_is_over, start_p2p
from deepspeed.comm.watch.watched_group import ShortMessages, WatchedGroup
from deepspeed.errors import PipelineError
from deepspeed.parallel.pipe.values import (
    AHEAD,
    HEADER,
    MessageLayout,
    NextMessages,
    as_bytes,
    put_together,
    quick_description,
    slots_of,
    taken_apart,
)

ACTIVATIONS, GRADIENTS = "activations", "gradients"
_KINDS = (ACTIVATIONS, GRADIENTS)
_OTHER = {ACTIVATIONS: GRADIENTS, GRADIENTS: ACTIVATIONS}
HEADERS, DESCRIPTIONS, TENSORS = range(3)  # what may be in flight side by side
_TAGS = (1 << 30) + (1 << 28)  # above the tags of transports
_OWNERS = 8


@dataclass(frozen=True)
class Route:
    """The two stages of a channel."""

    kind: str  # the kind of message
    source: int  # the stage that sends
    target: int  # the stage that receives
    ranks: tuple[int, int]  # the ranks of the two
    watched: WatchedGroup  # the group that the watchdog supervises
    owner: int  # number of the engine, equal on both sides

    @cached_property
    def _channel(self) -> str:
        return f"{self.owner}/{self.kind} {self.source}->{self.target}/"

    def issue(self) -> tuple[str, int]:
        """Counts a message."""
        return self.watched.issue(self._channel)

    def guard(self, work: Any, ticket: tuple[str, int], micro_batch: int) -> None:
        """Waits for ``work`` under the watchdog."""
        self.watched.guard(work.wait, ticket, self.label(micro_batch), members=self.ranks, axis=PIPE)

    def label(self, micro_batch: int) -> str:
        """Returns the name of a message in errors and logs."""
        return (
            f"the {self.kind} of micro-batch {micro_batch} from stage {self.source} (rank {self.ranks[0]}) to stage "
            f"{self.target} (rank {self.ranks[1]})"
        )


@dataclass(frozen=True)
class _QueuedMessage:
    """A header or packet to be received into ``buffer``, 1-D bytes."""

    queue: ShortMessages
    peer: int
    tag: int
    buffer: torch.Tensor

    def wait(self) -> None:
        self.queue.take(self.peer, self.tag, self.buffer.numpy().data)

    def has_come(self) -> bool:
        return self.queue.take_if_there(self.peer, self.tag, self.buffer.numpy().data)


@dataclass(frozen=True)
class ChannelTransport:
    """Sends and receives the 1-D byte tensors of a channel, in order; each call returns a work with ``wait``.

    What is sent is HEADERS or DESCRIPTIONS, which are always on the host, or TENSORS.
    """

    group: Any  # a process group of gloo, with the ranks of both stages; its other channels have other tags
    peer: int  # the other rank in it, and in ``native``
    tag: int  # the first of three that no other channel between these ranks has
    queue: ShortMessages | None  # carries headers and packets between ranks of one host; None if there is none
    # a process group of the device's backend, for this kind of message and direction; None: tensors go through
    # ``group``
    native: Any

    @property
    def posts_tensors_ahead(self) -> bool:
        """Returns whether receives of tensors are started before it is known that they have been sent.

        Equal on both sides. False where a receive is a kernel, which would occupy the device until then.
        """
        return self.native is None

    def send(self, tensor: torch.Tensor, what: int) -> Any:
        """Starts to send ``tensor`` (contiguous, any shape); returns None where nothing needs to be kept for it."""
        if what == TENSORS and self.native is not None:
            return start_p2p(self.native.send, tensor, self.peer, 0)
        if what == HEADERS and self.queue is not None:
            self.queue.post(self.peer, self.tag, tensor.numpy().data)
            return None
        return start_p2p(self.group.send, tensor, self.peer, self.tag + what)

    def receive(self, tensor: torch.Tensor, what: int) -> Any:
        """Starts to receive into ``tensor`` (contiguous, any shape)."""
        if what == TENSORS and self.native is not None:
            return start_p2p(self.native.recv, tensor, self.peer, 0)
        if what == HEADERS and self.queue is not None:
            return _QueuedMessage(self.queue, self.peer, self.tag, tensor)
        return start_p2p(self.group.recv, tensor, self.peer, self.tag + what)

    def has_left(self, work: Any, what: int) -> bool:
        """Returns whether the send of a received message has completed on the device too."""
        return self.native is None or what != TENSORS or bool(work.is_completed())

    def has_come(self, work: Any, what: int) -> bool:
        """Returns whether a receive is known to be complete; then it has waited for ``work``, without a watchdog."""
        return what == HEADERS and self.queue is not None and bool(work.has_come())


@dataclass
class _SentMessage:
    """A message that has been started."""

    ticket: tuple[str, int]
    micro_batch: int
    works: list[tuple[Any, int]]
    kept: list[tuple[torch.Tensor, int]]


class ChannelSender:
    """The sending end of a channel.

    ``packs`` says whether small tensors are packed with the header, see :class:`MessageLayout`, equally on both sides.
    ``received`` returns the number of messages received in the other direction.
    """

    def __init__(self, route: Route, transport: ChannelTransport, *, packs: bool, received: Callable[[], int]) -> None:
        self._route = route
        self._transport = transport
        self._packs = packs
        self._count_received = received
        self._text = b""
        self._quick: Any = None  # of the latest message
        self._expected = NextMessages(posts_tensors=transport.posts_tensors_ahead)
        self._leaving: deque[_SentMessage] = deque()
        self._left = 0

    def send(self, micro_batch: int, value: Any) -> None:
        """Starts a message of any nesting, without blocking; tensors must not be written to until they have left."""
        tensors: list[torch.Tensor] = []
        quick = quick_description(value, tensors)
        is_new = False
        if quick is None or quick != self._quick:
            self._quick = quick
            description, tensors = taken_apart(value)
            text = _as_text(description)
            is_new, self._text = text != self._text, text
        posted, has_buffers = self._expected.posted_layout(0), self._expected.has_buffers()
        before = self._expected.layout
        self._expected.advance(MessageLayout(slots_of(description), packs=self._packs) if is_new else None)
        layout = self._expected.layout
        assert layout is not None
        packet = torch.empty(posted.nbytes if posted and posted.is_packed else HEADER.size, dtype=torch.uint8)
        HEADER.pack_into(packet.numpy().data, 0, micro_batch, len(self._text) if is_new else 0, self._count_received())
        sent = [(packet, HEADERS)]
        if is_new:
            sent.append((torch.frombuffer(bytearray(self._text), dtype=torch.uint8), DESCRIPTIONS))
        if is_new and has_buffers:
            assert before is not None
            device = tensors[0].device if tensors else torch.device("cpu")
            sent += [(torch.zeros(slot.nbytes, dtype=torch.uint8, device=device), TENSORS) for slot in before.slots]
        if layout.is_packed and posted is layout:
            layout.put(packet, tensors)
        elif layout.is_packed:
            later = torch.empty(layout.nbytes, dtype=torch.uint8)
            layout.put(later, tensors)
            sent.append((later, TENSORS))
        else:
            sent += [(as_bytes(tensor), TENSORS) for tensor in tensors]
        ticket = self._route.issue()
        nbytes = count = 0
        works = []
        for tensor, what in sent:
            if size := tensor.numel():  # bytes
                nbytes, count = nbytes + size, count + 1
                if (work := self._transport.send(tensor, what)) is not None:
                    works.append((work, what))
        traffic.record_requested("send", nbytes, PIPE)
        traffic.record_ran("send", nbytes, PIPE, count)
        if works or self._leaving:  # they are released in order
            self._leaving.append(_SentMessage(ticket, micro_batch, works, sent))
        else:
            self._left += 1

    @property
    def kept(self) -> int:
        """Number of messages whose sends may not be complete."""
        return len(self._leaving)

    def drop_sent(self, received: int) -> None:
        """Keeps nothing of the first ``received`` messages, which are known to have been received."""
        while (
            self._leaving
            and self._left < received
            and all(self._transport.has_left(*each) for each in self._leaving[0].works)
        ):
            for work, _ in self._leaving.popleft().works:
                work.wait()  # returns at once, so that no watch is needed
            self._left += 1

    def drain(self) -> None:
        """Waits until all sends are complete."""
        while self._leaving:
            oldest = self._leaving[0]
            for work, _ in oldest.works:
                self._route.guard(work, oldest.ticket, oldest.micro_batch)
            self._leaving.popleft()
            self._left += 1


def _as_text(description: Any) -> bytes:
    try:
        return encode(description)
    except TypeError as error:
        raise PipelineError(
            f"the output of the stage holds, besides tensors, something that cannot be sent ({error}); let its "
            "last layer return tensors and plain values in tuples, lists, dicts or dataclasses"
        ) from error


@dataclass
class _PostedReceive:
    """A receive that has been started."""

    packet: torch.Tensor
    work: Any
    layout: MessageLayout | None  # of the tensors for which the packet has space behind the header
    buffers: list[torch.Tensor] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)


class ChannelReceiver:
    """The receiving end of a channel; ``packs`` is as of :class:`ChannelSender`.

    ``drop_sent`` is called with the number of this rank's messages in the other direction that were received.
    """

    def __init__(
        self,
        route: Route,
        transport: ChannelTransport,
        device: torch.device,
        *,
        packs: bool,
        drop_sent: Callable[[int], None],
    ) -> None:
        self._route = route
        self._transport = transport
        self._device = device
        self._packs = packs
        self._drop_sent = drop_sent
        self._description: Any = None
        self._known = NextMessages(posts_tensors=transport.posts_tensors_ahead)
        self._posted: deque[_PostedReceive] = deque()
        self.expected = 0  # messages that are still to be received in this step
        self.received = 0  # messages that have been received since the beginning

    def expect(self, count: int) -> None:
        """Sets the number of messages of a step, and posts the first receives."""
        self.expected = count
        self._post()

    def _post(self) -> None:
        for number in range(len(self._posted), min(AHEAD, self.expected)):
            layout = self._known.posted_layout(number)
            layout = layout if layout is not None and layout.is_packed else None
            packet = torch.empty(layout.nbytes if layout else HEADER.size, dtype=torch.uint8)
            self._posted.append(_PostedReceive(packet, self._transport.receive(packet, HEADERS), layout))
        if self._posted and self._known.has_buffers() and not self._posted[0].buffers:
            assert self._known.layout is not None
            self._make_buffers(self._posted[0], self._known.layout)

    def _make_buffers(self, posted: _PostedReceive, layout: MessageLayout) -> None:
        posted.buffers = [slot.empty(self._device) for slot in layout.slots]
        posted.works = [
            self._transport.receive(as_bytes(buffer), TENSORS) for buffer in posted.buffers if buffer.numel()
        ]

    def take(self, micro_batch: int) -> Any:
        """Waits for the next message, of this micro-batch, with receives of those after it posted.

        Raises:
            PipelineError: The message has another number.
        """
        self.expected = max(self.expected, 1)  # for schedules that do not declare counts
        self._post()
        ticket = self._route.issue()
        posted = self._posted.popleft()
        if not self._transport.has_come(posted.work, HEADERS):
            self._route.guard(posted.work, ticket, micro_batch)
        number, length, received = HEADER.unpack_from(posted.packet.numpy().data)
        if number != micro_batch:
            raise PipelineError(
                f"stage {self._route.target} expected {self._route.label(micro_batch)}, and micro-batch {number} came: "
                "the stages do not follow the same schedule, or have different numbers of micro-batches"
            )
        buffers = self._remaining(posted, length, ticket, micro_batch)
        for slot, tensor in zip(self._known.layout.slots, buffers, strict=True):  # type: ignore[union-attr]
            if slot.requires_grad:
                tensor.requires_grad_()
        self.expected -= 1
        self.received += 1
        if self._known.has_buffers():
            self._post()
        self._drop_sent(received)
        return put_together(self._description, buffers)

    def _remaining(
        self, posted: _PostedReceive, length: int, ticket: tuple[str, int], micro_batch: int
    ) -> list[torch.Tensor]:
        """Returns the tensors of a message whose header has come."""
        if length:
            text = torch.empty(length, dtype=torch.uint8)
            self._route.guard(self._transport.receive(text, DESCRIPTIONS), ticket, micro_batch)
            for work in posted.works:  # padding: these receives carry no data
                self._route.guard(work, ticket, micro_batch)
            posted.buffers, posted.works = [], []
            self._description = decode(text.numpy().tobytes())
            self._known.advance(MessageLayout(slots_of(self._description), packs=self._packs))
        else:
            self._known.advance(None)
        layout = self._known.layout
        assert layout is not None
        if layout.is_packed:
            packet = posted.packet
            if posted.layout is not layout:
                packet = torch.empty(layout.nbytes, dtype=torch.uint8)
                self._route.guard(self._transport.receive(packet, TENSORS), ticket, micro_batch)
            return layout.taken_from(packet)
        if not posted.buffers:
            self._make_buffers(posted, layout)
        for work in posted.works:
            self._route.guard(work, ticket, micro_batch)
        return posted.buffers


# -- all channels of a stage -------------------------------------------------------------------------------------------


class StageChannels:
    """The channels of this rank's stage, whose model computes on ``device``. Every rank of the job must make it."""

    def __init__(self, job: Job, mesh: Mesh, device: torch.device) -> None:
        self._device = device
        self._groups = job.watched
        rank = job.ranks.rank_in()
        self._ranks = mesh.group(rank, PIPE)
        self.stage = mesh.position(rank, PIPE)
        self._out: dict[tuple[str, int], ChannelSender] = {}
        self._in: dict[tuple[str, int], ChannelReceiver] = {}
        self._native: dict[tuple[str, bool], Any] = {}
        self._queue: ShortMessages | None = None
        if len(self._ranks) == 1:
            return
        timeout, pipes = comm.default_timeout(), mesh.groups(PIPE)
        # All stages share the job's group: transfers have tags, and every further gloo group has further threads.
        why = "transfers between stages"
        self._axis: Axis | None = job.axis_over(pipes, PIPE, why=why, device=device, timeout=timeout, backend="gloo")
        watched = self._axis.watched
        assert watched is not None
        self._watched: WatchedGroup | None = watched
        self._owner = watched.watch.next_owner(f"{watched.scope}stages")
        backend = job.ranks.backend_for(job.ranks.world, device)
        if backend != "gloo":
            # Both directions need streams of their own, or they would wait for each other.
            for kind in _KINDS:
                for upwards in (True, False):
                    why = f"{kind} between stages, {'up' if upwards else 'down'}"
                    self._native[kind, upwards] = job.process_groups.mine(
                        pipes, backend=backend, timeout=timeout, why=why, owner="job"
                    )
        # Packing pays if tensors are on the host and are sent like headers.
        self._packs = not self._native and device.type == "cpu"
        # Code that has the group has opened it already; requested here, as every rank of a pipeline is.
        self._queue = open_message_queue(job.connector.over(self._axis.group, None, PIPE))
        watched.watch.members.add(self)

    def connect_pairs(self, stage_of: Sequence[int]) -> None:
        """Makes the communicators between this stage and its neighbors. Every rank of the pipeline must call it.

        NCCL makes a communicator of two ranks at their first transfer, which blocks the host until both have come to
        it; in the middle of a step that can be a cycle. Here all ranks go through the pairs in one order. ``stage_of``
        is the stage of each chunk of the model.
        """
        if len(self._ranks) == 1 or not self._native:
            return
        ways: dict[tuple[str, int, int], None] = {}  # the channels, in one order on all ranks
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
        """Runs one schedule of all stages inside the context; what is sent in it is received in it.

        If the block fails on some rank, no later engine reuses the communicators.
        """
        with ExitStack() as rows:
            for group in self._native.values():
                watched = self._groups.of(group)
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
            back = _OTHER[kind], stage
            self._out[kind, stage] = ChannelSender(
                route,
                transport,
                packs=self._packs,
                received=lambda: self._in[back].received if back in self._in else 0,
            )
        return self._out[kind, stage]

    def incoming(self, kind: str, stage: int) -> ChannelReceiver:
        """Returns the channel that carries ``kind`` from another stage."""
        if (kind, stage) not in self._in:
            route, transport = self._connect(kind, stage, self.stage)
            back = _OTHER[kind], stage

            def drop_sent(count: int) -> None:
                if back in self._out:
                    self._out[back].drop_sent(count)

            self._in[kind, stage] = ChannelReceiver(
                route, transport, self._device, packs=self._packs, drop_sent=drop_sent
            )
        return self._in[kind, stage]

    @property
    def kept(self) -> int:
        """Messages of this rank that may not have left yet."""
        return sum(channel.kept for channel in self._out.values())

    def drain(self) -> None:
        """Waits until all sends are complete."""
        for channel in self._out.values():
            channel.drain()
        if self._queue is not None and self._queue.has_unsent:
            assert self._watched is not None
            # Completion needs no call of another rank, so the watchdog need not supervise it: a receiver may be late.
            label = "free space for messages to other stages"
            self._watched.guard(self._queue.flush, self._watched.issue("queue"), label, members=(), axis=PIPE)

    def _connect(self, kind: str, source: int, target: int) -> tuple[Route, ChannelTransport]:
        if self._watched is None or self._axis is None:
            raise job_is_over(f"{kind} between stages")
        peer = target if source == self.stage else source
        ranks = (self._ranks[source], self._ranks[target])
        route = Route(kind, source, target, ranks, self._watched, self._owner)
        place = self._axis.members.index(self._ranks[peer])
        number = self._owner % _OWNERS * len(_KINDS) + _KINDS.index(kind)
        native = self._native[kind, source < target] if self._native else None
        return route, ChannelTransport(self._axis.group, place, _TAGS + 3 * number, self._queue, native)


def connect_stages(job: Job, mesh: Mesh, device: torch.device) -> StageChannels:
    """Returns the channels of this rank's stage, whose model is on ``device``. Every rank of the job must call it."""
    return job.make(StageChannels, job, mesh, device)
