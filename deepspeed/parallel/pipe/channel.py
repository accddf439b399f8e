"""What crosses from one stage to the next: any nested value, numbered, without shapes that were agreed beforehand.

A *channel* carries one kind of message (activations, gradients) in one direction between two stages, in the order of
the schedule. A message is a *header* (its micro-batch, the length of the description where that has changed, how many
messages the sender has taken that came the other way), the description where it has changed, and the tensors. Small
tensors lie in one packet with the header; others are sent one by one, byte by byte from where they lie.

Receives are posted ahead: headers and packets for the next two messages, as no computation should wait for these, other
tensors for the next message only, as their buffers are large. Both sides derive from the messages so far which receives
are posted: the layout of the message two before, if that was the layout of its predecessor too. The tensors of a
message with another layout follow separately, and zeros fill what was posted, since a posted receive cannot be taken
back. Sends never block; what they carry is kept until it has left.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from deepspeed.axes import PIPE
from deepspeed.comm.transports.counters import traffic
from deepspeed.comm.watch.watched_group import WatchedGroup
from deepspeed.errors import PipelineError
from deepspeed.parallel.pipe.values import Slot, put_together, quick_description, slots_of, taken_apart

ACTIVATIONS, GRADIENTS = "activations", "gradients"
HEADERS, DESCRIPTIONS, TENSORS = range(3)  # what may be on its way side by side
_HEADER = struct.Struct("=3q")
_HEADER_NBYTES = _HEADER.size
_ALIGNED = 16  # bytes; the largest element
_PACKET = 1 << 16  # bytes up to which copying costs less than a transfer more
_AHEAD = 2


class PipeTransport(Protocol):
    """Sends and receives 1-D byte tensors between two stages, in order; each returns a work with ``wait``.

    ``what`` is one of HEADERS and DESCRIPTIONS, which lie on the host wherever the model computes, and TENSORS.

    Attributes:
        posts_tensors_ahead: Receives of tensors are started before it is known that they have been sent. Equal on both
            sides. Not where a receive is a kernel, which would occupy the device until then.
    """

    posts_tensors_ahead: bool

    def send(self, tensor: torch.Tensor, what: int) -> Any:
        """Starts to send ``tensor`` (contiguous, any shape); returns None where nothing needs to be kept for it."""

    def receive(self, tensor: torch.Tensor, what: int) -> Any:
        """Starts to receive into ``tensor`` (contiguous, any shape)."""

    def has_left(self, work: Any, what: int) -> bool:
        """Returns whether a send of a message that has been taken is over on the device too."""

    def has_come(self, work: Any, what: int) -> bool:
        """Returns whether a receive is complete, so that its wait need not be watched; False where it is not known.

        Where it is true, ``work`` has been waited for.
        """


@dataclass(frozen=True)
class Route:
    """Between whom a channel runs.

    Attributes:
        kind: What it carries.
        source: The stage that sends.
        target: The stage that receives.
        ranks: The ranks of the two.
        watched: How this rank takes part in the job's watch.
        owner: Number of the engine, equal on both sides.
    """

    kind: str
    source: int
    target: int
    ranks: tuple[int, int]
    watched: WatchedGroup
    owner: int

    @cached_property
    def _channel(self) -> str:
        return f"{self.owner}/{self.kind} {self.source}->{self.target}/"

    def issue(self) -> tuple[str, int]:
        """Counts a message."""
        return self.watched.issue(self._channel)

    def guard(self, work: Any, ticket: tuple[str, int], micro_batch: int) -> None:
        """Waits, watched."""
        self.watched.guard(work.wait, ticket, self.label(micro_batch), members=self.ranks, axis=PIPE)

    def label(self, micro_batch: int) -> str:
        """Returns what a message is called in errors and logs."""
        return (
            f"the {self.kind} of micro-batch {micro_batch} from stage {self.source} (rank {self.ranks[0]}) to stage "
            f"{self.target} (rank {self.ranks[1]})"
        )


class MessageLayout:
    """Lays out the tensors of a message for sending.

    Args:
        slots: Theirs.
        packs: Small ones may lie in one packet with the header.

    Attributes:
        slots: As given.
        is_packed: They do.
        nbytes: Bytes of the packet.
    """

    def __init__(self, slots: Sequence[Slot], *, packs: bool) -> None:
        self.slots = tuple(slots)
        self._starts: list[int] = []
        self._strides = [torch.empty(slot.shape, device="meta").stride() for slot in self.slots]
        self.nbytes = _HEADER_NBYTES
        for slot in self.slots:
            self._starts.append(-(-self.nbytes // _ALIGNED) * _ALIGNED)
            self.nbytes = self._starts[-1] + slot.nbytes
        self.is_packed = packs and self.nbytes <= _PACKET

    @property
    def cost(self) -> tuple[int, int]:
        """Bytes and transfers of a message like the one before it."""
        if self.is_packed:
            return self.nbytes, 1
        sizes = [slot.nbytes for slot in self.slots]
        return _HEADER_NBYTES + sum(sizes), 1 + sum(nbytes > 0 for nbytes in sizes)

    def put(self, packet: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copies tensors, in the shapes of the slots, into a packet (1-D bytes)."""
        for buffer, tensor in zip(self.taken_from(packet), tensors, strict=True):
            buffer.copy_(_plain(tensor))

    def taken_from(self, packet: torch.Tensor) -> list[torch.Tensor]:
        """Returns the tensors of a packet (1-D bytes) in the shapes of the slots, where they lie.

        Each may be written to without changing the version of the others.
        """
        return [
            torch.empty(0, dtype=slot.dtype).set_(
                packet.untyped_storage(), start // slot.dtype.itemsize, slot.shape, strides
            )
            for start, slot, strides in zip(self._starts, self.slots, self._strides, strict=True)
        ]


class _NextMessages:
    """Tracks the operations posted for the next messages; equal on both ends of a channel."""

    def __init__(self, *, posts_tensors: bool) -> None:
        self._posts_tensors = posts_tensors
        self.layout: MessageLayout | None = None  # of the latest message
        self._next: deque[MessageLayout | None] = deque([None] * _AHEAD)

    def of(self, number: int) -> MessageLayout | None:
        """Returns the layout whose packet is posted for the message after ``number`` others; None: only a header is."""
        return self._next[number]

    def has_buffers(self) -> bool:
        """Returns whether tensors that are not packed are posted for the next message."""
        is_known = self._next[0] is not None and self._next[0] is self.layout
        return self._posts_tensors and is_known and self.layout is not None and not self.layout.is_packed

    def message(self, layout: MessageLayout | None) -> None:
        """Notes another message.

        Args:
            layout: Its layout; None: that of the message before.
        """
        self._next.popleft()
        self._next.append(self.layout if layout is None else None)
        self.layout = layout or self.layout


@dataclass
class _SentMessage:
    """A message that has been started."""

    ticket: tuple[str, int]
    micro_batch: int
    works: list[tuple[Any, int]]
    kept: list[tuple[torch.Tensor, int]]


class ChannelSender:
    """The sending end of a channel.

    Args:
        route: Between whom.
        transport: Over what.
        packs: Small tensors may lie in one packet with the header, see :class:`MessageLayout`; equal on both sides.
        taken: How many messages have been taken that came the other way.
    """

    def __init__(self, route: Route, transport: PipeTransport, *, packs: bool, taken: Callable[[], int]) -> None:
        self._route = route
        self._transport = transport
        self._packs = packs
        self._taken = taken
        self._text = b""
        self._quick: Any = None  # of the latest message
        self._expected = _NextMessages(posts_tensors=transport.posts_tensors_ahead)
        self._leaving: deque[_SentMessage] = deque()
        self._left = 0

    def send(self, micro_batch: int, value: Any) -> None:
        """Starts a message; does not block.

        Args:
            micro_batch: Its number.
            value: Any nesting; tensors must not be written to until they have left.
        """
        tensors: list[torch.Tensor] = []
        quick = quick_description(value, tensors)
        is_new = False
        if quick is None or quick != self._quick:
            self._quick = quick
            description, tensors = taken_apart(value)
            text = _as_text(description)
            is_new, self._text = text != self._text, text
        posted, has_buffers = self._expected.of(0), self._expected.has_buffers()
        before = self._expected.layout
        self._expected.message(MessageLayout(slots_of(description), packs=self._packs) if is_new else None)
        layout = self._expected.layout
        assert layout is not None
        packet = torch.empty(posted.nbytes if posted and posted.is_packed else _HEADER_NBYTES, dtype=torch.uint8)
        _HEADER.pack_into(packet.numpy().data, 0, micro_batch, len(self._text) if is_new else 0, self._taken())
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
        """Messages that may not have left yet."""
        return len(self._leaving)

    def let_go(self, taken: int) -> None:
        """Keeps nothing of the first ``taken`` messages, which are known to have been taken."""
        while (
            self._leaving
            and self._left < taken
            and all(self._transport.has_left(*each) for each in self._leaving[0].works)
        ):
            for work, _ in self._leaving[0].works:
                work.wait()  # returns at once, so that no watch is needed
            self._forget_oldest()

    def drain(self) -> None:
        """Waits until everything has left."""
        while self._leaving:
            oldest = self._leaving[0]
            for work, _ in oldest.works:
                self._route.guard(work, oldest.ticket, oldest.micro_batch)
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self._leaving.popleft()
        self._left += 1


def _as_text(description: Any) -> bytes:
    try:
        return pickle.dumps(description)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
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
    """The receiving end of a channel.

    Args:
        route: Between whom.
        transport: Over what.
        device: Where the model computes.
        packs: Small tensors may lie in one packet with the header, see :class:`MessageLayout`; equal on both sides.
        let_go: Called with the number of this rank's messages in the other direction that were received.

    Attributes:
        expected: Messages that are still to be received in this step.
        taken: Messages that have been received since the beginning.
    """

    def __init__(
        self,
        route: Route,
        transport: PipeTransport,
        device: torch.device,
        *,
        packs: bool,
        let_go: Callable[[int], None],
    ) -> None:
        self._route = route
        self._transport = transport
        self._device = device
        self._packs = packs
        self._let_go = let_go
        self._description: Any = None
        self._known = _NextMessages(posts_tensors=transport.posts_tensors_ahead)
        self._posted: deque[_PostedReceive] = deque()
        self.expected = self.taken = 0

    def expect(self, count: int) -> None:
        """Sets the number of messages of a step, and posts the first receives."""
        self.expected = count
        self._post()

    def _post(self) -> None:
        for number in range(len(self._posted), min(_AHEAD, self.expected)):
            layout = self._known.of(number)
            layout = layout if layout is not None and layout.is_packed else None
            packet = torch.empty(layout.nbytes if layout else _HEADER_NBYTES, dtype=torch.uint8)
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
        """Waits for the next message, with receives of those after it posted.

        Args:
            micro_batch: The number that it must have.

        Raises:
            PipelineError: It has another one.
        """
        self.expected = max(self.expected, 1)  # a schedule without counts
        self._post()
        ticket = self._route.issue()
        posted = self._posted.popleft()
        if not self._transport.has_come(posted.work, HEADERS):
            self._route.guard(posted.work, ticket, micro_batch)
        number, length, taken = _HEADER.unpack_from(posted.packet.numpy().data)
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
        self.taken += 1
        if self._known.has_buffers():
            self._post()
        self._let_go(taken)
        return put_together(self._description, buffers)

    def _remaining(
        self, posted: _PostedReceive, length: int, ticket: tuple[str, int], micro_batch: int
    ) -> list[torch.Tensor]:
        """Returns the tensors of a message whose header has come."""
        if length:
            text = torch.empty(length, dtype=torch.uint8)
            self._route.guard(self._transport.receive(text, DESCRIPTIONS), ticket, micro_batch)
            for work in posted.works:  # nothing of value
                self._route.guard(work, ticket, micro_batch)
            posted.buffers, posted.works = [], []
            self._description = pickle.loads(text.numpy().tobytes())
            self._known.message(MessageLayout(slots_of(self._description), packs=self._packs))
        else:
            self._known.message(None)
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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's values as a 1-D tensor of bytes, where it lies if it is dense."""
    return _plain(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return plain if plain.layout is torch.strided else plain.to_dense()
