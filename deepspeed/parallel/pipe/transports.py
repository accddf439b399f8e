"""The transport of one channel between two stages: gloo with tags, otherwise a communicator per direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepspeed.comm.transports.transport import start_p2p
from deepspeed.comm.watch.watched_group import ShortMessages

HEADERS, DESCRIPTIONS, TENSORS = range(3)  # what may be in flight side by side


class PipeTransport(Protocol):
    """Sends and receives 1-D byte tensors between two stages, in order; each returns a work with ``wait``.

    ``what`` is HEADERS or DESCRIPTIONS, which are always on the host, or TENSORS.
    """

    @property
    def posts_tensors_ahead(self) -> bool:
        """Returns whether receives of tensors are started before it is known that they have been sent.

        Equal on both sides. False where a receive is a kernel, which would occupy the device until then.
        """

    def send(self, tensor: torch.Tensor, what: int) -> Any:
        """Starts to send ``tensor`` (contiguous, any shape); returns None where nothing needs to be kept for it."""

    def receive(self, tensor: torch.Tensor, what: int) -> Any:
        """Starts to receive into ``tensor`` (contiguous, any shape)."""

    def has_left(self, work: Any, what: int) -> bool:
        """Returns whether the send of a received message has completed on the device too."""

    def has_come(self, work: Any, what: int) -> bool:
        """Returns whether a receive is known to be complete, so that its wait need not be supervised.

        If it returns True, it has waited for ``work``.
        """


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


def transport_over(
    group: Any, peer: int, tag: int, *, queue: ShortMessages | None, native: Any = None
) -> PipeTransport:
    """Returns the transport of one channel.

    Args:
        group: A process group of gloo, with the ranks of both stages.
        peer: The other rank in it, and in ``native``.
        tag: The first of three that no other channel between these ranks has.
        queue: Message queue for headers and packets between ranks of one host; None if there is none.
        native: A process group of the device's backend, for this kind of message and direction; None: tensors go
            through ``group``.
    """
    tagged = _Tagged(group, peer, tag)
    host = tagged if queue is None else _QueueTransport(queue, tagged)
    return host if native is None else _Ordered(native, host, peer)
