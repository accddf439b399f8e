"""The tier of host memory: shards, gradients copied from the device, and updates that overlap with copies.

With an accelerator, a reduced gradient is copied to the host while backward still runs. The update of bucket *i* works
in host memory; its 16-bit result is copied to the device while bucket *i + 1* is updated. If the model computes on the
CPU, host memory is the device: nothing is copied, and results are bit-equal to training without offload.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from typing_extensions import override

from deepspeed.comm.transports.transport import Work
from deepspeed.offload.pinned import host_device, host_tensor, page_buffer
from deepspeed.offload.streams import CopyHandle, CopyStream
from deepspeed.zero.gradient.gradient_sum import GradientDestination, Squares, add_into
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import FlatBuffer, Memory, MemoryTracker, StorageKind
from deepspeed.zero.update.loop import Operands, PendingCopy, UpdateSlice, UpdateStrategy
from deepspeed.zero.update.masters import MasterBucket

_MAX_STAGING = 2  # one buffer in a copy, one that is written


class HostMemory(Memory):
    """Stores tensors in host memory."""

    tier = Tier.HOST

    def __init__(self, device: torch.device, *, pin: bool, up: CopyStream) -> None:
        super().__init__(device)
        self.pin = pin
        self._up = up

    @property
    def tensor_device(self) -> torch.device:
        """The host."""
        return host_device()

    @override
    def empty(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        return host_tensor(numel, dtype, pin=self.pin)

    @override
    def read(self, source: torch.Tensor, target: torch.Tensor) -> Work:
        return self._up.copy(target, source)

    @override
    def await_reads(self) -> None:
        self._up.wait_on_host()

    @override
    def ordered(self) -> AbstractContextManager[Any]:
        return self._up.context()


class StagingPool:
    """Host buffers that receive gradients of later micro-batches from the device, shared by all buckets."""

    def __init__(self, *, pin: bool, down: CopyStream) -> None:
        self.pin = pin
        self.down = down
        self._lock = threading.RLock()  # a speculative update waits for its gradient in another thread
        self._free: list[torch.Tensor] = []
        self._waiting: deque[tuple[HeldBuffer, torch.Tensor, CopyHandle, Squares | None]] = deque()

    def add(self, result: HeldBuffer, gradient: torch.Tensor, squares: Squares | None = None) -> None:
        """Starts to add ``gradient`` (1-D) to ``result``; adds the squares of the sum to ``squares``."""
        with self._lock:
            while len(self._waiting) >= _MAX_STAGING:
                self._add_oldest()
            numel, dtype = gradient.numel(), gradient.dtype
            fits = [i for i, buffer in enumerate(self._free) if buffer.numel() >= numel and buffer.dtype == dtype]
            staging = self._free.pop(fits[0]) if fits else host_tensor(numel, dtype, pin=self.pin)
            self._waiting.append((result, staging, self.down.copy(staging[:numel], gradient), squares))

    def _add_oldest(self, drop: bool = False) -> None:
        result, staging, arrival, squares = self._waiting.popleft()
        arrival.wait_on_host()
        if not drop:
            result.arrival.wait_on_host()
            add_into(result.tensor, staging[: result.tensor.numel()], squares)
        self._free.append(staging)

    def settle(self, result: HeldBuffer, *, drop: bool = False) -> None:
        """Adds pending gradients to ``result``, or drops them."""
        with self._lock:
            for _ in range(len(self._waiting)):
                if self._waiting[0][0] is result:
                    self._add_oldest(drop)
                else:
                    self._waiting.rotate(-1)


class HeldBuffer(FlatBuffer):
    """Host memory of a reduced gradient, reused in every step because locking pages is slow."""

    def __init__(self, numel: int, dtype: torch.dtype, *, pin: bool, memory_tracker: MemoryTracker) -> None:
        self.nbytes = numel * dtype.itemsize
        memory_tracker.add(StorageKind.GRADIENT, Tier.HOST, self.nbytes)
        self.tensor = host_tensor(numel, dtype, pin=pin)
        memory_tracker.claim(self.tensor)
        self._storage = self.tensor.untyped_storage()
        self.is_allocated = True
        self.arrival = CopyHandle()

    @override
    def allocate(self) -> None: ...

    def free(self) -> None:
        """Does nothing: the memory is kept."""

    def drop(self, memory_tracker: MemoryTracker) -> None:
        """Subtracts its bytes from the tracker; the memory is freed with the last reference."""
        memory_tracker.add(StorageKind.GRADIENT, Tier.HOST, -self.nbytes)


class HostGradientDestination(GradientDestination):
    """Copies the reduced gradients of one bucket from an accelerator to host memory."""

    def __init__(self, pool: StagingPool, memory_tracker: MemoryTracker) -> None:
        super().__init__(Tier.HOST)
        self._pool = pool
        self._memory_tracker = memory_tracker
        self._held: HeldBuffer | None = None

    @property
    def incoming_tier(self) -> Tier:
        """The tier in which reductions run: the device."""
        return Tier.DEVICE

    @override
    def to_destination(self, reduced: FlatBuffer) -> FlatBuffer:
        if self._held is not None:
            self._pool.settle(self._held, drop=True)  # gradients of an aborted step
            self._held.arrival.wait_on_host()
        held = self._hold(reduced.tensor.numel(), reduced.tensor.dtype)
        held.arrival = self._pool.down.copy(held.tensor, reduced.tensor)
        reduced.free()
        return held

    def _hold(self, numel: int, dtype: torch.dtype) -> HeldBuffer:
        """Returns the buffer of the gradient in ``dtype`` or a wider one; replaces a narrower one."""
        if self._held is not None and self._held.tensor.dtype.itemsize < dtype.itemsize:
            self._held.drop(self._memory_tracker)
            self._held = None
        if self._held is None:
            self._held = HeldBuffer(numel, dtype, pin=self._pool.pin, memory_tracker=self._memory_tracker)
        return self._held

    @override
    def add(
        self, result: FlatBuffer, reduced: FlatBuffer, dtype: torch.dtype, squares: Squares | None = None
    ) -> FlatBuffer:
        """Starts to add ``reduced`` (1-D, on the device) to ``result``; adds the squares of the sum to ``squares``."""
        assert result is self._held and self._held is not None
        if result.tensor.dtype.itemsize < dtype.itemsize:
            self.wait(result)
            held = self._hold(result.tensor.numel(), dtype)
            held.tensor.copy_(result.tensor)
        self._pool.add(self._held, reduced.tensor, squares)
        reduced.free()
        return self._held

    @override
    def wait(self, result: FlatBuffer) -> None:
        if result is self._held and self._held is not None:
            self._pool.settle(self._held)
            self._held.arrival.wait_on_host()


class HostUpdate(UpdateStrategy):
    """Updates masters in host memory; results are copied to the device while the next chunk is updated.

    Args:
        chunk_numel: Largest number of elements in a chunk.
    """

    def __init__(self, *, chunk_numel: int, pin: bool, up: CopyStream) -> None:
        self.chunk_numel = chunk_numel
        self._pin = pin
        self._up = up
        self._staging: deque[tuple[torch.Tensor, CopyHandle]] = deque()
        self._last: CopyHandle | None = None

    @override
    def begin(self, chunks: Sequence[UpdateSlice]) -> None:
        # The update writes compute shards in host memory; a gather whose wait() was not called may still read one.
        self._up.wait_on_host()
        self._last = None

    def _out(self, chunk: UpdateSlice) -> torch.Tensor | None:
        out = chunk.master.out
        if out is None or chunk.master.writes_out_in_place:
            return super()._out(chunk)
        nbytes = chunk.numel * out.element_size()
        return self._free_staging(nbytes)[:nbytes].view(out.dtype)

    def _free_staging(self, nbytes: int) -> torch.Tensor:
        """Returns a buffer of bytes whose last copy is complete."""
        if len(self._staging) >= _MAX_STAGING:
            buffer, copied = self._staging.popleft()
            copied.wait_on_host()
            if buffer.numel() >= nbytes:
                return buffer
        return page_buffer(nbytes, pin=self._pin)

    @override
    def store(self, chunk: UpdateSlice, operands: Operands, updated: Sequence[slice]) -> None:
        master = chunk.master
        if operands.out is None or master.writes_out_in_place:
            return
        copied = CopyHandle()
        if master.bucket.memory.tier is Tier.FILE:
            super().store(chunk, operands, updated)
        else:
            copied = self._copy_to_device(chunk, operands, updated)
        storage = operands.out.untyped_storage()
        buffer = torch.empty(0, dtype=torch.uint8, device=operands.out.device).set_(storage)
        self._staging.append((buffer, copied))

    def _copy_to_device(self, chunk: UpdateSlice, operands: Operands, updated: Sequence[slice]) -> CopyHandle:
        """Starts to copy new compute parameters to the device; returns the handle of the last copy."""
        assert chunk.master.out is not None and operands.out is not None
        copied = CopyHandle()
        target = chunk.master.out[chunk.start : chunk.stop]
        for part in self._complete(chunk, operands, updated):
            self._last = copied = self._up.copy(target[part], operands.out[part])
        return copied

    @override
    def store_whole(self, chunk: UpdateSlice, operands: Operands, updated: Sequence[slice]) -> PendingCopy | None:
        master = chunk.master
        if master.writes_out_in_place or master.bucket.memory.tier is Tier.FILE:
            return super().store_whole(chunk, operands, updated)
        return self._copy_to_device(chunk, operands, updated)

    @override
    def before_publish(self, master: MasterBucket) -> None:
        if self._last is not None:
            self._last.wait()

    @override
    def finish(self) -> None:
        if self._last is not None:
            self._last.wait()

    @override
    def close(self) -> None:
        self._up.wait_on_host()
        self._staging.clear()
