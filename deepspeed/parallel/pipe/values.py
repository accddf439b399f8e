"""Separates nested values into tensors and a description of the rest, for sending between stages.

Tuples (named ones too), lists, dicts and dataclasses may be nested; everything else that is not a tensor is part of the
description, which is sent as data (:mod:`deepspeed.comm.base.encoding`). :class:`MessageLayout` lays the tensors out
for sending, and :class:`NextMessages` tells which of their receives are posted ahead.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepspeed import nested

HEADER = struct.Struct("=3q")
"""A message's micro-batch, bytes of its description, and messages received in the other direction."""
AHEAD = 2
"""Messages for which receives of headers and packets are posted."""
_ALIGNED = 16  # bytes; the largest element
_PACKET = 1 << 16  # bytes up to which a copy is cheaper than another transfer


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor in a description."""

    index: int  # index among the tensors
    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool  # whether a gradient comes back for it

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        """Allocates memory for the tensor."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


map_tensors = partial(nested.map_tensors, in_dataclasses=True)
"""Changes the tensors of values that stages send to each other."""


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Returns every tensor of a nested value, in order; one that occurs twice is there twice."""
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


def taken_apart(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Returns the description of a value, and its tensors in the order of the slots."""
    tensors: list[torch.Tensor] = []

    def slot(tensor: torch.Tensor) -> Slot:
        tensors.append(tensor)
        return Slot(len(tensors) - 1, tensor.dtype, tuple(tensor.shape), tensor.requires_grad)

    return map_tensors(value, slot), tensors


def quick_description(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns a quick stand-in for a description, for messages that are like the one before them.

    It is equal for values whose descriptions are equal; None for a value that holds other things than tensors, None,
    tuples and lists. ``tensors`` receives the tensors (any shape), in the order of the slots.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.dtype, value.shape, value.requires_grad
    if value is None:
        return ()
    if type(value) not in (tuple, list):
        return None
    parts = [quick_description(item, tensors) for item in value]
    return None if None in parts else (type(value), parts)


def shapes_of(value: Any) -> str:
    """Returns the shapes of a nested value for a message: ``(4, 16)``, ``((4, 16), (4,))``, ``a str``."""
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape))
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(shapes_of, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {shapes_of(item)}' for key, item in value.items())}}}"
    return "None" if value is None else f"a {type(value).__name__}"


def _is_slot(value: Any) -> bool:
    return isinstance(value, Slot)


def slots_of(description: Any) -> list[Slot]:
    """Returns the slots of a description, in order."""
    found: list[Slot] = []
    map_tensors(description, found.append, _is_slot)
    return sorted(found, key=lambda slot: slot.index)


def put_together(description: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Returns the value of a description, with ``tensors`` (in the shapes of the slots) in the place of the slots."""
    return map_tensors(description, lambda slot: tensors[slot.index], _is_slot)


def to_device(value: Any, device: torch.device) -> Any:
    """Returns ``value`` with its tensors on ``device``."""
    return map_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def detached(value: Any) -> Any:
    """Returns ``value`` with tensors that no graph leads to."""
    return map_tensors(value, lambda tensor: tensor.detach())


def leaves_of(value: Any) -> Any:
    """Returns ``value`` with tensors that begin a graph of their own, as if they had come from another rank.

    They are copies: the next chunk may write to them, and the backward of the one before may need them as they are.
    """
    return map_tensors(value, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def writable(value: Any) -> Any:
    """Returns ``value`` with leaves replaced by tensors that may be changed in place: no leaves, no views."""

    def freed(tensor: torch.Tensor) -> torch.Tensor:
        is_free = not (tensor.requires_grad and tensor.is_leaf)
        return tensor if is_free else torch.ops.aten._unsafe_view.default(tensor, tensor.shape)

    return map_tensors(value, freed)


# -- messages between stages -------------------------------------------------------------------------------------------


class MessageLayout:
    """Lays out the tensors of a message for sending; where it ``packs``, small ones come with the header."""

    def __init__(self, slots: Sequence[Slot], *, packs: bool) -> None:
        self.slots = tuple(slots)
        self._starts: list[int] = []
        self._strides = [torch.empty(slot.shape, device="meta").stride() for slot in self.slots]
        self.nbytes = HEADER.size  # bytes of the packet
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
        return HEADER.size + sum(sizes), 1 + sum(nbytes > 0 for nbytes in sizes)

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


class NextMessages:
    """Tracks the operations posted for the next messages; equal on both ends of a channel."""

    def __init__(self, *, posts_tensors: bool) -> None:
        self._posts_tensors = posts_tensors
        self.layout: MessageLayout | None = None  # of the latest message
        self._next: deque[MessageLayout | None] = deque([None] * AHEAD)

    def posted_layout(self, number: int) -> MessageLayout | None:
        """Returns the layout whose packet is posted for the message after ``number`` others; None: only a header is."""
        return self._next[number]

    def has_buffers(self) -> bool:
        """Returns whether receives of unpacked tensors are posted for the next message."""
        is_known = self._next[0] is not None and self._next[0] is self.layout
        return self._posts_tensors and is_known and self.layout is not None and not self.layout.is_packed

    def advance(self, layout: MessageLayout | None) -> None:
        """Moves on by a message that is sent or received, of this layout; None: that of the message before."""
        self._next.popleft()
        self._next.append(self.layout if layout is None else None)
        self.layout = layout or self.layout


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's values as a 1-D tensor of bytes; a view if it is dense."""
    return _plain(tensor).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return plain if plain.layout is torch.strided else plain.to_dense()
