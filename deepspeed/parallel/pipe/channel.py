"""What crosses from one stage to the next: any nested value, numbered, without shapes that were agreed beforehand.

A *channel* carries one kind of message (activations, gradients) in one direction between two stages, in the order of
the schedule. A message is a *word* of four numbers (the micro-batch, whether the description has changed, its length,
whether old room is flushed), the description where it has changed, and the tensors, byte by byte from where they lie.

Receives are posted one message ahead, the tensors' too: into room of the last message's shapes, as soon as two messages
in a row had the same. If the next one turns out otherwise, its sender fills that room with nothing of value before the
tensors, since a posted receive cannot be taken back. Both sides know from the messages so far whether room is posted.
Sends never block; what they carry is kept until it has left.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from deepspeed.comm.counters import traffic
from deepspeed.comm.mesh import PIPE
from deepspeed.comm.party import Party
from deepspeed.errors import PipelineError
from deepspeed.parallel.pipe.values import Slot, put_together, slots_of, taken_apart

ACTIVATIONS, GRADIENTS = "activations", "gradients"
_WORD = 4
WORD_NBYTES = _WORD * torch.int64.itemsize
"""Bytes of what goes before the tensors of each message."""


class Wire(Protocol):
    """Sends and receives 1-D byte tensors between two stages, in order; each returns a work with ``wait``."""

    def send(self, tensor: torch.Tensor, *, on_host: bool) -> Any:
        """Starts a send. ``on_host``: the tensor lies on the host, wherever the model computes."""

    def receive(self, tensor: torch.Tensor, *, on_host: bool) -> Any:
        """Starts a receive."""


@dataclass(frozen=True)
class Route:
    """Between whom a channel runs.

    Attributes:
        kind: What it carries.
        source: The stage that sends.
        target: The stage that receives.
        ranks: The ranks of the two.
        party: How this rank takes part in the job's watch.
        owner: Number of the engine, equal on both sides.
    """

    kind: str
    source: int
    target: int
    ranks: tuple[int, int]
    party: Party
    owner: int

    def issue(self) -> tuple[str, int]:
        """Counts a message."""
        return self.party.issue(f"{self.owner}/{self.kind} {self.source}->{self.target}/")

    def guard(self, work: Any, ticket: tuple[str, int], micro_batch: int) -> None:
        """Waits, watched."""
        self.party.guard(work.wait, ticket, self.label(micro_batch), members=self.ranks)

    def label(self, micro_batch: int) -> str:
        """A message in words."""
        return (
            f"the {self.kind} of micro-batch {micro_batch} from stage {self.source} (rank {self.ranks[0]}) to stage "
            f"{self.target} (rank {self.ranks[1]})"
        )


class Outgoing:
    """The sending end of a channel."""

    def __init__(self, route: Route, wire: Wire) -> None:
        self._route = route
        self._wire = wire
        self._text = b""
        self._slots: list[Slot] = []
        self._room_is_posted = False
        self._leaving: deque[tuple[tuple[str, int], int, list[Any], list[torch.Tensor]]] = deque()

    def send(self, micro_batch: int, value: Any) -> None:
        """Starts a message; does not block.

        Args:
            micro_batch: Its number.
            value: Any nesting; tensors must not be written to until they have left.
        """
        self._let_go()
        description, tensors = taken_apart(value)
        text = pickle.dumps(description)
        changed = text != self._text
        flushes = changed and self._room_is_posted
        word = torch.tensor([micro_batch, int(changed), len(text) if changed else 0, int(flushes)])
        sent: list[tuple[torch.Tensor, bool]] = [(word.view(torch.uint8), True)]
        if changed:
            sent.append((torch.frombuffer(bytearray(text), dtype=torch.uint8), True))
        if flushes:
            device = tensors[0].device if tensors else torch.device("cpu")
            sent += [(torch.zeros(slot.nbytes, dtype=torch.uint8, device=device), False) for slot in self._slots]
        sent += [(as_bytes(tensor), False) for tensor in tensors]
        self._text, self._room_is_posted = text, not changed
        self._slots = slots_of(description) if changed else self._slots
        ticket = self._route.issue()
        works = [self._wire.send(tensor, on_host=on_host) for tensor, on_host in sent if tensor.numel()]
        nbytes = sum(tensor.numel() for tensor, _ in sent)
        traffic.record_asked("send", nbytes, PIPE)
        traffic.record_ran("send", nbytes, PIPE, len(works))
        self._leaving.append((ticket, micro_batch, works, [tensor for tensor, _ in sent]))

    def _let_go(self) -> None:
        while self._leaving and all(work.is_completed() for work in self._leaving[0][2]):
            self._leaving.popleft()

    def drain(self) -> None:
        """Waits until everything has left."""
        while self._leaving:
            ticket, micro_batch, works, _ = self._leaving[0]
            for work in works:
                self._route.guard(work, ticket, micro_batch)
            self._leaving.popleft()


@dataclass
class _Posted:
    """A receive that has been started."""

    ticket: tuple[str, int]
    word: torch.Tensor
    work: Any
    room: list[torch.Tensor] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)


class Incoming:
    """The receiving end of a channel.

    Attributes:
        expected: Messages that are still to be received in this step.
    """

    def __init__(self, route: Route, wire: Wire, device: torch.device) -> None:
        self._route = route
        self._wire = wire
        self._device = device
        self._description: Any = None
        self._slots: list[Slot] = []
        self._posts_room = False
        self._posted: _Posted | None = None
        self.expected = 0

    def expect(self, count: int) -> None:
        """Says how many messages a step has, and posts the first receive."""
        self.expected = count
        self._post()

    def _post(self) -> None:
        if self._posted is not None or self.expected == 0:
            return
        word = torch.empty(_WORD, dtype=torch.int64)
        work = self._wire.receive(word.view(torch.uint8), on_host=True)
        self._posted = _Posted(self._route.issue(), word, work)
        if self._posts_room:
            self._make_room(self._posted)

    def _make_room(self, posted: _Posted) -> None:
        posted.room = [slot.empty(self._device) for slot in self._slots]
        posted.works = [self._wire.receive(as_bytes(room), on_host=False) for room in posted.room if room.numel()]

    def take(self, micro_batch: int) -> Any:
        """Waits for the next message and posts the receive of the one after it.

        Args:
            micro_batch: The number that it must have.

        Raises:
            PipelineError: It has another one.
        """
        if self._posted is None:
            self.expected = max(self.expected, 1)  # a schedule that nobody has counted
            self._post()
        posted, self._posted = self._posted, None
        assert posted is not None
        wait: Callable[[Any], None] = lambda work: self._route.guard(work, posted.ticket, micro_batch)  # noqa: E731
        wait(posted.work)
        number, changed, length, flushes = posted.word.tolist()
        if number != micro_batch:
            raise PipelineError(
                f"stage {self._route.target} expected {self._route.label(micro_batch)}, and micro-batch {number} came: "
                "the stages do not follow the same schedule, or have different numbers of micro-batches"
            )
        if changed:
            text = torch.empty(length, dtype=torch.uint8)
            wait(self._wire.receive(text, on_host=True))
            if flushes:
                for work in posted.works:
                    wait(work)
            self._description = pickle.loads(text.numpy().tobytes())
            self._slots = slots_of(self._description)
        if changed or not self._posts_room:
            self._make_room(posted)
        self._posts_room = not changed
        for work in posted.works:
            wait(work)
        for slot, tensor in zip(self._slots, posted.room, strict=True):
            tensor.requires_grad_(slot.requires_grad)
        self.expected -= 1
        self._post()
        return put_together(self._description, posted.room)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values as a 1-D tensor of bytes, where it lies if it is dense."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        plain = plain.to_dense()
    return plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
