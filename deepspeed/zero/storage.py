"""Flat buffers whose memory is freed and allocated again, and the memory tracker that counts it.

Freeing is ``untyped_storage().resize_(0)`` and growing is resizing back, so that the views cut once from a buffer stay
valid objects for the life of the model: a gather writes the parameters in place. Torch does not guard a freed storage
(a kernel that reads it may crash the process). So before memory is freed its references are counted; if other code
still has a view (a cached weight, an output that is a slice of one), the memory is left to them with the values that it
has, and the buffer continues with other memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
from typing_extensions import override

from deepspeed.comm.transports.transport import DoneWork, Transport, Work
from deepspeed.torch_private import storage_references
from deepspeed.zero.placement import Tier


class StorageKind(Enum):
    """Names what a counted byte holds."""

    COMPUTE = "compute parameters"
    GATHERED = "gathered parameters"
    GRADIENT_BUCKET = "gradient buckets"
    GRADIENT = "gradients"
    MASTER = "master weights"
    OPTIMIZER = "optimizer state"
    SHADOW = "shadow masters and states"
    STAGING = "staging buffers"
    PRIVATE = "error feedback"

    __hash__ = object.__hash__  # Enum's own runs in Python, and every bucket that moves is counted


class MemoryObserver(Protocol):
    """Observes every memory tracker's changes of its counts."""

    def counted(self, kind: StorageKind, tier: Tier, nbytes: int) -> None:
        """Called when ``nbytes`` were added to the count (negative: subtracted)."""

    def claimed(self, tensor: torch.Tensor) -> None:
        """Called when the whole storage of ``tensor`` (any shape) has been counted."""


class MemoryTracker:
    """Bytes alive and their peak, by kind and tier. One per ZeRO instance."""

    observer: ClassVar[MemoryObserver | None] = None  # called with every entry, or None

    def __init__(self) -> None:
        self._live: dict[tuple[StorageKind, Tier], int] = defaultdict(int)
        self._peak: dict[tuple[StorageKind, Tier], int] = defaultdict(int)

    def add(self, kind: StorageKind, tier: Tier, nbytes: int) -> None:
        """Adds to the count; called before the memory is allocated."""
        key = (kind, tier)
        self._live[key] += nbytes
        self._peak[key] = max(self._peak[key], self._live[key])
        if self.observer is not None:
            self.observer.counted(kind, tier, nbytes)

    def claim(self, tensor: torch.Tensor) -> None:
        """Records that an entry stands for the memory of ``tensor`` (any shape)."""
        if self.observer is not None:
            self.observer.claimed(tensor)

    def set(self, kind: StorageKind, tier: Tier, nbytes: int) -> None:
        """Sets the bytes of state that this package measures and does not allocate (an optimizer's own)."""
        self.add(kind, tier, nbytes - self._live[(kind, tier)])

    def live(self, kind: StorageKind, tier: Tier = Tier.DEVICE) -> int:
        """Returns the bytes of ``kind`` that are allocated now."""
        return self._live[(kind, tier)]

    def live_at(self, tier: Tier) -> int:
        """Returns the bytes of all kinds that are allocated now in ``tier``."""
        return sum(nbytes for (_, where), nbytes in self._live.items() if where is tier)

    def peak(self, kind: StorageKind, tier: Tier = Tier.DEVICE) -> int:
        """Returns the most bytes of ``kind`` that were allocated at once since :meth:`reset_peak`."""
        return self._peak[(kind, tier)]

    def reset_peak(self) -> None:
        """Sets the peak to the bytes that are allocated now."""
        self._peak = defaultdict(int, self._live)


class Memory:
    """One tier: makes tensors there and moves values between them and the device.

    This class is the device tier, where nothing has to move; the other tiers are in ``deepspeed.offload``. In every
    tier, any code may read and write the tensors between two operations of the engine (a tensor in a file is mapped
    into memory), so only code on the hot path needs the methods below.
    """

    tier = Tier.DEVICE

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def tensor_device(self) -> torch.device:
        """Device of the tensors that are kept here."""
        return self.device

    @property
    def lends(self) -> bool:
        """Returns whether the device can use tensors of this tier in place as full parameters."""
        return False

    def empty(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        """Returns a 1-D tensor of this tier, not initialized; ``label`` names it in messages."""
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=self.tensor_device)

    staging_bytes = 0
    """Bytes of host memory in staging buffers."""

    def open(self, tensors: Sequence[tuple[int, int]], memory_tracker: MemoryTracker) -> None:
        """Reserves space for the tensors to come, so that a lack of space is found before training.

        Args:
            tensors: ``(elements, bytes per element)`` of every tensor to come.
            memory_tracker: Where buffers besides those tensors are counted.
        """

    def initialize(self, target: torch.Tensor, value: float) -> None:
        """Fills a view, of any shape, of what :meth:`empty` made with one value."""
        target.fill_(value)

    def announce(self, tensor: torch.Tensor) -> None:
        """Announces that :meth:`read` of ``tensor`` (1-D) comes soon."""

    def read(self, source: torch.Tensor, target: torch.Tensor) -> Work:
        """Copies a tensor of this tier to a tensor on the device.

        Args:
            source: 1-D, made by :meth:`empty`, whole.
            target: 1-D on the device, same dtype and length; or ``source`` itself, of a tier that lends.

        Returns:
            A handle. Device work issued inside :meth:`ordered` may use ``target`` at once, other work after ``wait``.
        """
        target.copy_(source)
        return DoneWork()

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies into a tensor of this tier; done when :meth:`settle` has returned.

        Args:
            target: A 1-D view of what :meth:`empty` made.
            source: Same dtype and length; it may change as soon as this method has returned.
        """
        target.copy_(source)

    def await_reads(self) -> None:
        """Blocks the host until every :meth:`read` is done, so that the host may write to the tensors."""

    def forget(self) -> None:
        """Withdraws announcements that were not read, so that other code may change the tensors."""

    def ordered(self) -> AbstractContextManager[Any]:
        """Returns a context for :meth:`read` and for the collective that sends its result on."""
        return nullcontext()

    def settle(self) -> None:
        """Waits until every :meth:`write` is done."""

    def close(self) -> None:
        """Frees the memory; its tensors must not be used any more. May be called twice."""


class FlatBuffer:
    """A 1-D buffer that can be freed and grown again under the same tensor object.

    Attributes:
        tensor: 1-D; reading it while ``is_allocated`` is False is undefined.
        on_move: Called with the old and the new :attr:`storage_key` when other views kept the old memory.
    """

    on_move: Callable[[int, int], None] | None = None
    _own_views: tuple[torch.Tensor, ...] = ()
    _own_references: int | None = None  # references to the storage while the buffer is guarded

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kind: StorageKind,
        memory_tracker: MemoryTracker,
        tier: Tier = Tier.DEVICE,
        allocate: bool = True,
    ) -> None:
        memory_tracker.add(kind, tier, numel * dtype.itemsize)
        with torch.inference_mode(False):  # an inference tensor could not be written by the next training step
            self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self._kind = kind
        self._tier = tier
        self._memory_tracker = memory_tracker
        self.is_allocated = True
        memory_tracker.claim(self.tensor)
        if not allocate:
            self.free()

    @property
    def storage_key(self) -> int:
        """Identifies the storage, allocated or not: every view of the buffer has the same key."""
        return self._storage._cdata

    def allocate(self) -> None:
        """Allocates the memory; the content is undefined. Does nothing if it is allocated."""
        if not self.is_allocated:
            self._memory_tracker.add(self._kind, self._tier, self.nbytes)
            with torch.inference_mode(False):
                self._storage.resize_(self.nbytes)
            self.is_allocated = True

    def free(self) -> None:
        """Frees the memory, or leaves it to other views of it. Does nothing if it is free."""
        if self.is_allocated:
            if self._own_references is None:
                if self._storage.resizable():  # mapped pages are not resizable: they are freed with the last reference
                    self._storage.resize_(0)
            elif self._references() > self._own_references or self._has_fixed_size():
                self._leave_to_others()
            else:
                self._storage.resize_(0)
            self.is_allocated = False
            self._memory_tracker.add(self._kind, self._tier, -self.nbytes)

    def guard(self, views: Sequence[torch.Tensor]) -> None:
        """Makes :meth:`free` check for views held by other code, from now on.

        Args:
            views: Views of any shape that the owner keeps; no other view may exist at the moment.
        """
        self._own_views = tuple(views)
        self._own_references = self._references()

    def _has_fixed_size(self) -> bool:
        """Returns whether the size of the storage is fixed: it can be neither freed nor grown again.

        ``numpy()`` of a view does so, and so does ``share_memory_()``, after which torch crashes in ``resize_``.
        """
        return not self._storage.resizable() or (self._storage.device.type == "cpu" and self._storage.is_shared())

    def _references(self) -> int:
        return storage_references(self._storage)

    def _leave_to_others(self) -> None:
        old_key = self.storage_key
        with torch.inference_mode(False), torch.no_grad():
            fresh = torch.empty(self.tensor.numel(), dtype=self.tensor.dtype, device=self.tensor.device)
            self._storage = fresh.untyped_storage()
            for view in (*self._own_views, self.tensor):
                view.set_(fresh, view.storage_offset(), view.size(), view.stride())  # type: ignore[call-overload]
            del fresh
            self._memory_tracker.claim(self.tensor)
            self._storage.resize_(0)
        if self.on_move is not None:
            self.on_move(old_key, self.storage_key)

    def forget(self) -> None:
        """Subtracts the buffer from the count; its memory lives as long as a view of it exists."""
        if self.is_allocated:
            self._memory_tracker.add(self._kind, self._tier, -self.nbytes)
            self.is_allocated = False

    @classmethod
    def holding(cls, tensor: torch.Tensor, like: FlatBuffer, tier: Tier) -> FlatBuffer:
        """Returns a buffer of the kind of ``like`` whose memory is that of ``tensor`` (1-D, alone in its storage)."""
        made = cls.__new__(cls)
        made.tensor = tensor
        made._storage = tensor.untyped_storage()
        made.nbytes = tensor.numel() * tensor.element_size()
        made._kind, made._tier, made._memory_tracker = like._kind, tier, like._memory_tracker
        made.is_allocated = True
        made._memory_tracker.add(made._kind, tier, made.nbytes)
        made._memory_tracker.claim(tensor)
        return made

    def views(self, starts: tuple[int, ...], shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """Returns the views of the buffer, one per start and shape.

        They stay valid objects across freeing and growing.
        """
        was_free = not self.is_allocated
        if was_free:
            self.allocate()
        made = []
        for start, shape in zip(starts, shapes, strict=True):
            numel = 1
            for extent in shape:
                numel *= extent
            made.append(self.tensor[start : start + numel].view(shape))
        if was_free:
            self.free()
        return made


class LoanedBuffer(FlatBuffer):
    """A full buffer over a bucket's only slice (1-D), in a tier that lends: it is neither allocated nor freed."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._storage = tensor.untyped_storage()
        self.nbytes = 0
        self.is_allocated = False

    @override
    def allocate(self) -> None:
        self.is_allocated = True

    def free(self) -> None:
        """Marks the buffer as free. The memory stays where it is, so views of it stay valid."""
        self.is_allocated = False

    @override
    def guard(self, views: Sequence[torch.Tensor]) -> None: ...

    @override
    def forget(self) -> None:
        self.is_allocated = False


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor``, or a contiguous copy, with its values in memory: no view that conjugates or negates them."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of ``tensor`` in which no two elements share memory as those of an ``expand``-ed one do.

    Its expanded dimensions have size 1. Code that writes ``tensor.numel()`` elements to the address of an expanded
    tensor writes past the end of its memory.
    """
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


@torch.no_grad()
def broadcast_values(tensor: torch.Tensor, transport: Transport, *, label: str) -> None:
    """Overwrites ``tensor`` (any shape) with that of group rank 0. Every rank of ``transport`` must call it.

    Values are sent as contiguous bytes, since backends do not support all dtypes and strides.
    """
    values = distinct(tensor)
    sent = dense(values)
    transport.broadcast(sent.view(-1).view(torch.uint8), 0, label=label)
    if sent is not values:
        values.copy_(sent)
