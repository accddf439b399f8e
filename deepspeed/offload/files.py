"""The tier of files: tensors mapped from a file, and transfers through page-aligned buffers.

Every tensor of this tier is a mapping of its part of the file, so that checkpoints, ``safe_get_full_fp32_param`` and
users can read and write it like any other tensor. Training does not use the mapping, but reads and writes the file
directly. The two are not used at the same time, so they agree: the kernel writes mapped changes back before a direct
read, and drops cached pages after a direct write.

If :class:`CachePolicy` chooses the page cache and the model computes in host memory, only the mapping is used: tensors
are copied from it, or used in place.

Direct access suits a model larger than memory: the page cache would evict its pages before their next use, and pages of
other programs too. Parameters that are not updated and fit into free memory are better cached: after the first use they
are read at the speed of memory, and the system frees the pages when memory is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from typing_extensions import override

from deepspeed.accelerator import get_accelerator, host_memory
from deepspeed.comm.transports.transport import DoneWork, Work
from deepspeed.errors import OffloadError, require_state
from deepspeed.logging import log_dist
from deepspeed.offload.file_io import BlockFile, IoSettings, Transfer
from deepspeed.offload.pinned import PAGE, host_device, page_buffer, round_to_pages
from deepspeed.offload.run_directory import RunDirectory, open_file, open_folder
from deepspeed.offload.streams import CopyHandle, CopyStream
from deepspeed.torch_private import storage_key
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import Memory, MemoryTracker, StorageKind

_RESERVE = 8  # 1/8 of the host's memory stays free
BufferSize = Callable[[Sequence[tuple[int, int]]], int]
"""Takes ``(elements, bytes per element)`` of all tensors; returns the bytes of one staging buffer."""


@dataclass(frozen=True)
class CachePolicy:
    """Decides whether the page cache is used."""

    requested: bool | None = False  # ``offload_param.page_cache``; None: use the cache if the values fit
    # whether the values are updated; then cached pages would be written to the disk at every step
    is_trained: bool = True
    ranks: int = 1  # number of ranks on this host, which are taken to need equal amounts

    def choose(self, nbytes: int) -> tuple[bool, str]:
        """Returns whether the ``nbytes`` of this rank are cached, and the reason for the log, which may be empty."""
        if self.requested is not None:
            return (
                self.requested,
                f"offload_param.page_cache is {str(self.requested).lower()}" if self.requested else "",
            )
        if self.is_trained:
            return False, ""
        needed, free = nbytes * self.ranks, host_memory.available_bytes()
        fits = needed + host_memory.total_bytes() // _RESERVE <= free
        return fits, f"{needed:,} bytes on this host, {free:,} of its memory are free"


@dataclass(frozen=True)
class FileSettings:
    """Holds the configuration of one set of files."""

    parent: str  # the folder ``nvme_path``
    purpose: str  # ``parameters`` or ``optimizer``
    rank: int  # global rank
    io: IoSettings  # sizes and numbers of requests
    pin: bool  # lock the buffers' pages
    # whether zeros are written to new files; False: reserved space reads as zeros anyway
    zeros_are_written: bool = True
    cache: CachePolicy = CachePolicy()  # decides whether the page cache is used


class FileMemory(Memory):
    """Stores tensors in a file.

    Args:
        settings: Folder, rank, access and cache policy of the file.
        buffer_bytes: Returns the size of a buffer.
    """

    tier = Tier.FILE

    def __init__(
        self,
        device: torch.device,
        settings: FileSettings,
        *,
        buffer_count: int,
        buffer_bytes: BufferSize,
        up: CopyStream,
    ) -> None:
        super().__init__(device)
        self._settings = settings
        self._up = up
        self._buffer_count = buffer_count
        self._buffer_bytes = buffer_bytes
        self._directory: RunDirectory | None = None
        self._file: BlockFile | None = None
        self._reserved = 0  # bytes of the file that belong to no tensor yet
        self._offsets: dict[int, int] = {}  # offset in the file, by the storage of a mapping
        self._free: list[torch.Tensor] = []
        self._copying: deque[tuple[torch.Tensor, CopyHandle]] = deque()
        self._writing: deque[tuple[int, torch.Tensor, Transfer]] = deque()
        self._ahead: dict[int, tuple[torch.Tensor, Transfer]] = {}
        self._buffer_nbytes = 0
        self._is_mapped = False  # only the mappings are used
        self._memory_tracker: MemoryTracker | None = None

    @property
    def tensor_device(self) -> torch.device:
        """The host: mapped tensors are host tensors."""
        return host_device()

    @property
    def lends(self) -> bool:
        """Whether tensors are loaned: only mapped ones that are not updated, as an update could occur during a loan."""
        return self._is_mapped and not self._settings.cache.is_trained

    @property
    def file(self) -> BlockFile:
        """The file; exists after :meth:`empty`, or after :meth:`open` with tensors."""
        assert self._file is not None
        return self._file

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of one staging buffer."""
        return self._buffer_nbytes

    # -- making ------------------------------------------------------------------------------------------------------

    def open(self, tensors: Sequence[tuple[int, int]], memory_tracker: MemoryTracker) -> None:
        """Creates the file with space for ``tensors``, and the staging buffers; does nothing without tensors.

        Args:
            tensors: ``(elements, bytes per element)`` of every tensor that will be made.

        Raises:
            OffloadError: The folder or file cannot be created, the disk is too small, or the configured buffers are.
        """
        self._memory_tracker = memory_tracker
        if tensors:
            self._create(tensors, memory_tracker)

    def _create(self, tensors: Sequence[tuple[int, int]], memory_tracker: MemoryTracker) -> None:
        settings = self._settings
        nbytes = sum(round_to_pages(numel * itemsize) for numel, itemsize in tensors)
        cached, why = settings.cache.choose(nbytes)
        self._is_mapped = cached and get_accelerator().shares_host_memory(self.device)
        self._buffer_nbytes = 0 if self._is_mapped else round_to_pages(self._buffer_bytes(tensors))
        self._directory = open_folder(settings.parent, rank=settings.rank, purpose=settings.purpose)
        path = self._directory.path / f"{settings.purpose}.bin"
        self._file = open_file(path, replace(settings.io, direct=not cached))
        self._file.grow(nbytes)
        self._reserved = nbytes
        self.staging_bytes = self._buffer_count * self._buffer_nbytes
        memory_tracker.add(StorageKind.STAGING, Tier.HOST, self.staging_bytes)
        self._free = [page_buffer(self._buffer_nbytes, pin=settings.pin) for _ in range(self._buffer_count)]
        for buffer in self._free:
            memory_tracker.claim(buffer)
        access = "direct access" if self._file.is_direct else "access through the page cache"
        log_dist(
            f"offload: {settings.purpose} in {self._directory.path} ({nbytes:,} bytes on this rank, {access}"
            f"{f': {why}' if why else ''}); other ranks have folders next to it"
        )

    @override
    def empty(self, numel: int, dtype: torch.dtype, label: str) -> torch.Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype)
        mapped_bytes = round_to_pages(nbytes)
        if self._file is None:  # open() got no tensors, as no parameter was trained
            assert self._memory_tracker is not None, "open() must be called first"
            self._create([(numel, dtype.itemsize)], self._memory_tracker)
        file = self.file
        if self._reserved < mapped_bytes:
            file.grow(mapped_bytes - self._reserved)
            self._reserved = mapped_bytes
        offset = file.size - self._reserved
        self._reserved -= mapped_bytes
        try:
            tensor = file.map(offset, mapped_bytes, numel, dtype)
        except OSError as error:
            raise OffloadError(
                f"{file.path}: {label} cannot be mapped ({error.strerror}); raise the limits of mapped memory"
            ) from error
        self._offsets[storage_key(tensor)] = offset
        return tensor

    @override
    def initialize(self, target: torch.Tensor, value: float) -> None:
        if value != 0 or self._settings.zeros_are_written:
            self.write(target, torch.full_like(target, value))
            # The owner may write through the mapping next, which must not precede this transfer.
            self._await_writes(self.locate(target)[0])

    def locate(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Returns the key of a tensor's mapping, and its offset in the file in bytes.

        Args:
            tensor: A 1-D tensor of :meth:`empty`, or a view of one.
        """
        base = storage_key(tensor)
        return base, self._offsets[base] + int(tensor.storage_offset()) * tensor.element_size()

    # -- reading -----------------------------------------------------------------------------------------------------

    @override
    def announce(self, tensor: torch.Tensor) -> None:
        base, offset = self.locate(tensor)
        if base in self._ahead:
            return
        if self._is_mapped:
            self.file.expect(offset, tensor.nbytes)
            return
        self._await_writes(base)
        buffer = self._free_buffer(wait=False)
        if buffer is not None:
            self._ahead[base] = (buffer, self._start_read(buffer, tensor, offset))

    def _start_read(self, buffer: torch.Tensor, tensor: torch.Tensor, offset: int) -> Transfer:
        return self.file.read(buffer[: round_to_pages(tensor.nbytes)], offset)

    @override
    def read(self, source: torch.Tensor, target: torch.Tensor) -> Work:
        base, offset = self.locate(source)
        if self._is_mapped:
            if storage_key(target) != base:
                target.copy_(source)
            return DoneWork()
        if base not in self._ahead:
            self._await_writes(base)
            buffer = self._free_buffer(wait=True)
            assert buffer is not None
            self._ahead[base] = (buffer, self._start_read(buffer, source, offset))
        buffer, transfer = self._ahead.pop(base)
        transfer.wait()
        values = buffer[: source.nbytes].view(source.dtype)
        copied = self._up.copy(target, values)
        if copied.is_done:
            self._free.append(buffer)
        else:
            self._copying.append((buffer, copied))
        return copied

    @override
    def ordered(self) -> AbstractContextManager[Any]:
        return self._up.context()

    @override
    def forget(self) -> None:
        for buffer, transfer in self._ahead.values():
            transfer.wait()
            self._free.append(buffer)
        self._ahead.clear()

    # -- writing -----------------------------------------------------------------------------------------------------

    @override
    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        base, offset = self.locate(target)
        nbytes = target.nbytes
        end = (target.storage_offset() + target.numel()) * target.element_size()
        ends_tensor = end == target.untyped_storage().nbytes()
        self._drop_ahead(base)
        # Direct writes would overwrite the neighbors in these pages.
        shares_pages = offset % PAGE or (nbytes % PAGE and not ends_tensor)
        if self._is_mapped or shares_pages:
            self._await_writes(base)
            target.copy_(source)
            return
        step = self._buffer_nbytes // target.element_size()
        for start in range(0, target.numel(), step):
            part = source[start : start + step]
            buffer = self._free_buffer(wait=True)
            assert buffer is not None
            size = part.numel() * target.element_size()
            buffer[:size].view(target.dtype).copy_(part)
            transfer = self.file.write(buffer[: round_to_pages(size)], offset + start * target.element_size())
            self._writing.append((base, buffer, transfer))

    @override
    def settle(self) -> None:
        while self._writing:
            self._finish_write()

    def _finish_write(self) -> None:
        _, buffer, transfer = self._writing.popleft()
        self._free.append(buffer)
        transfer.wait()

    def _await_writes(self, base: int) -> None:
        while any(entry[0] == base for entry in self._writing):
            self._finish_write()

    def _drop_ahead(self, base: int) -> None:
        if base in self._ahead:
            buffer, transfer = self._ahead.pop(base)
            self._free.append(buffer)
            transfer.wait()

    # -- buffers -----------------------------------------------------------------------------------------------------

    def _free_buffer(self, *, wait: bool) -> torch.Tensor | None:
        """Returns an unused staging buffer; with ``wait`` False, None if there is none yet."""
        while self._copying and self._copying[0][1].has_arrived():
            self._free.append(self._copying.popleft()[0])
        if not self._free and self._copying and wait:
            buffer, copied = self._copying.popleft()
            copied.wait_on_host()
            self._free.append(buffer)
        if not self._free and self._writing and wait:
            self._finish_write()
        if not self._free and self._ahead and wait:
            self._drop_ahead(next(iter(self._ahead)))
        return self._free.pop() if self._free else None

    def take_buffers(self, count: int) -> list[torch.Tensor]:
        """Removes ``count`` staging buffers and returns them; :meth:`read` and :meth:`write` use the others."""
        self.settle()
        self.forget()
        taken, self._free = self._free[:count], self._free[count:]
        require_state(len(taken) == count, self, f"{count} free staging buffers")
        return taken

    @override
    def close(self) -> None:
        try:
            self.settle()
            self.forget()
        finally:
            if self._file is not None:
                self._file.close()
            if self._directory is not None:
                self._directory.remove()
