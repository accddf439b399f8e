"""Inputs of checkpointed blocks in host memory, copied beside the computation.

A block's inputs are copied down while the next two blocks compute, and their device memory is free again when the
block after these begins. In backward the inputs of the two blocks before the present one are copied up; those of the
last two blocks never left. The host waits for no copy. Host memory is locked in the first step and reused: as much as
the inputs of all blocks that are away at once.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from deepspeed.offload.pinned import host_tensor, may_pin
from deepspeed.offload.streams import CopyHandle, CopyStream

_AHEAD = 2
"""Blocks whose inputs are on the device before their backward begins, and after their forward has ended."""


class HostActivations:
    """Keeps what blocks save for backward in host memory; tensors that are there anyway stay as they are.

    Attributes:
        locked_bytes: Host memory that it holds, in use or not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._down, self._up = CopyStream(device), CopyStream(device)
        self._free: defaultdict[tuple[int, torch.dtype], deque[tuple[torch.Tensor, CopyHandle]]] = defaultdict(deque)
        self._recent: deque[_SavedBlock] = deque()  # those whose tensors are still on the device
        self._last: weakref.ref[_SavedBlock] | None = None
        self.locked_bytes = 0

    def block(self) -> AbstractContextManager[Any]:
        """Returns a context for the forward of one block: what it saves is kept in host memory."""
        return torch.autograd.graph.saved_tensors_hooks(_SavedBlock(self).pack, _unpack)

    def _begin(self, block: _SavedBlock) -> None:
        """Called when a block saves its first tensor: the tensors of the block before the last two leave the device."""
        block.before, self._last = self._last, weakref.ref(block)
        self._recent.append(block)
        while len(self._recent) > _AHEAD:
            for saved in self._recent.popleft().saved():
                saved.leave()

    def put(self, saved: _SavedTensor, tensor: torch.Tensor) -> None:
        """Starts to copy ``tensor`` (any shape and dtype) to host memory."""
        key = tensor.numel(), tensor.dtype
        last = CopyHandle()
        if self._free[key]:
            saved.kept, last = self._free[key].popleft()
        else:
            saved.kept = host_tensor(*key, pin=may_pin(True))
            self.locked_bytes += saved.kept.nbytes
        with self._down.context():
            last.wait()  # the copy up from this memory
        saved.source = tensor.detach().contiguous()
        saved.down = self._down.copy(saved.kept, saved.source.view(-1), keeps=False)

    def fetch(self, saved: _SavedTensor) -> None:
        """Starts to copy a tensor back to the device, unless it is there or on the way."""
        if saved.source is None and saved.fetched is None:
            saved.fetched = torch.empty(saved.shape, dtype=saved.kept.dtype, device=self._device)
            with self._up.context():
                saved.down.wait()
            saved.up = self._up.copy(saved.fetched.view(-1), saved.kept, keeps=False)

    def release(self, saved: _SavedTensor) -> None:
        """Takes back the host memory of a tensor; device memory is reused when copies that use it are over."""
        if saved.source is not None:
            self._down.keep(saved.source)
        if saved.fetched is not None:
            self._up.keep(saved.fetched)
        self._free[saved.kept.numel(), saved.kept.dtype].append((saved.kept, saved.up))


class _SavedBlock:
    """What one block has saved. It lives as long as one of its tensors, or while it is among the last ones."""

    def __init__(self, store: HostActivations) -> None:
        self.store = store
        self.before: weakref.ref[_SavedBlock] | None = None  # the block that ran before
        self._saved: list[weakref.ref[_SavedTensor]] = []

    def saved(self) -> Iterator[_SavedTensor]:
        """Returns the tensors that backward still needs."""
        return (found for one in self._saved if (found := one()) is not None)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _SavedTensor:
        """Returns what autograd keeps in place of ``tensor`` (any shape)."""
        if tensor.device.type == "cpu" or not tensor.numel():
            return tensor
        if not self._saved:
            self.store._begin(self)
        saved = _SavedTensor(self, tensor)
        self._saved.append(weakref.ref(saved))
        return saved


class _SavedTensor:
    """One tensor in host memory: ``kept`` (1-D), and for a time on the device, as ``source`` or ``fetched``."""

    kept: torch.Tensor

    def __init__(self, block: _SavedBlock, tensor: torch.Tensor) -> None:
        self.block = block
        self.shape = tensor.shape
        self.source: torch.Tensor | None = None
        self.fetched: torch.Tensor | None = None
        self.down, self.up = CopyHandle(), CopyHandle()
        block.store.put(self, tensor)

    def leave(self) -> None:
        """Frees the device memory of ``source``, for what the current stream does after the copy down."""
        self.down.wait()
        self.source = None

    def take(self) -> torch.Tensor:
        """Returns the tensor on the device; the current stream waits for it."""
        if self.source is not None:
            return self.source
        self.block.store.fetch(self)
        assert self.fetched is not None
        self.up.wait()
        found, self.fetched = self.fetched, None
        return found

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.block.store.release(self)


def _unpack(packed: torch.Tensor | _SavedTensor) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    found = packed.take()
    block: _SavedBlock | None = packed.block
    for _ in range(_AHEAD):
        block = None if block is None or block.before is None else block.before()
        if block is not None:
            for saved in block.saved():
                block.store.fetch(saved)
    return found
