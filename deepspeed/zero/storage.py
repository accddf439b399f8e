"""Flat buffers whose memory comes and goes, and the ledger that counts it.

Freeing is ``untyped_storage().resize_(0)`` and growing is resizing back, so that the views cut once from a buffer stay
valid objects for the life of the model: a gather writes the parameters in place. Torch does not guard a freed storage
(a kernel that reads it may crash the process), so nothing outside this package may keep a view of one.
"""

from __future__ import annotations

from collections import defaultdict
from enum import Enum

import torch

from deepspeed.zero.placement import Home


class Kind(Enum):
    """What a counted byte holds."""

    COMPUTE = "compute parameters"
    GATHERED = "gathered parameters"
    GRADIENT_BUCKET = "gradient buckets"
    GRADIENT = "gradients"
    MASTER = "master weights"
    OPTIMIZER = "optimizer state"


class Ledger:
    """Bytes alive and their peak, by kind and home. One per ZeRO instance."""

    def __init__(self) -> None:
        self._live: dict[tuple[Kind, Home], int] = defaultdict(int)
        self._peak: dict[tuple[Kind, Home], int] = defaultdict(int)

    def add(self, kind: Kind, home: Home, nbytes: int) -> None:
        """Adds to the books."""
        key = (kind, home)
        self._live[key] += nbytes
        self._peak[key] = max(self._peak[key], self._live[key])

    def set(self, kind: Kind, home: Home, nbytes: int) -> None:
        """For state that is measured, not allocated, by this package (an optimizer's own)."""
        self.add(kind, home, nbytes - self._live[(kind, home)])

    def live(self, kind: Kind, home: Home = Home.DEVICE) -> int:
        """Bytes of ``kind`` that are allocated now."""
        return self._live[(kind, home)]

    def peak(self, kind: Kind, home: Home = Home.DEVICE) -> int:
        """Most bytes of ``kind`` that were allocated at once since :meth:`reset_peak`."""
        return self._peak[(kind, home)]

    def reset_peak(self) -> None:
        """Makes the peak what is allocated now."""
        self._peak = defaultdict(int, self._live)


class FlatBuffer:
    """A 1-D buffer that can be freed and grown again under the same tensor object.

    Attributes:
        tensor: 1-D; reading it while ``is_allocated`` is False is undefined.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kind: Kind,
        ledger: Ledger,
        home: Home = Home.DEVICE,
        allocate: bool = True,
    ) -> None:
        with torch.inference_mode(False):  # an inference tensor could not be written by the next training step
            self.tensor = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self._kind = kind
        self._home = home
        self._ledger = ledger
        self.is_allocated = True
        ledger.add(kind, home, self.nbytes)
        if not allocate:
            self.free()

    @property
    def storage_key(self) -> int:
        """Identifies the storage, allocated or not: every view of the buffer has the same key."""
        return self._storage._cdata

    def grow(self) -> None:
        """Allocates the memory; the content is undefined. Does nothing if it is allocated."""
        if not self.is_allocated:
            with torch.inference_mode(False):
                self._storage.resize_(self.nbytes)
            self.is_allocated = True
            self._ledger.add(self._kind, self._home, self.nbytes)

    def free(self) -> None:
        """Gives the memory back. Does nothing if it is free."""
        if self.is_allocated:
            self._storage.resize_(0)
            self.is_allocated = False
            self._ledger.add(self._kind, self._home, -self.nbytes)

    def views(self, starts: tuple[int, ...], shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """Views of the buffer, one per start and shape; they stay valid objects across freeing and growing."""
        was_free = not self.is_allocated
        if was_free:
            self.grow()
        made = []
        for start, shape in zip(starts, shapes, strict=True):
            numel = 1
            for extent in shape:
                numel *= extent
            made.append(self.tensor[start : start + numel].view(shape))
        if was_free:
            self.free()
        return made


def storage_key(tensor: torch.Tensor) -> int:
    """The key of the storage under ``tensor``; compare with :attr:`FlatBuffer.storage_key`."""
    return tensor.untyped_storage()._cdata
