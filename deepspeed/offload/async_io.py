"""Reads and writes of whole tensors from and to files, under the names of the operator ``async_io``.

``AsyncIOBuilder().load()`` returns this module. A request is cut into blocks, which ``queue_depth`` threads per unit of
``intra_op_parallelism`` read or write through the page cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from deepspeed.errors import OffloadError
from deepspeed.offload.pinned import PAGE, may_pin, page_buffer, round_to_pages

__all__ = ["aio_handle", "aio_read", "aio_write", "deepspeed_memcpy"]


class aio_handle:  # noqa: N801  # upstream's name
    """Reads and writes files with several requests in flight.

    Args:
        block_size: Bytes of one request.
        queue_depth: Requests in flight, per unit of ``intra_op_parallelism``.
        single_submit: Without effect: every request is submitted alone.
        overlap_events: Without effect: requests always overlap.
        intra_op_parallelism: Factor of ``queue_depth``.
    """

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 8,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        self._settings = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._pool = ThreadPoolExecutor(queue_depth * intra_op_parallelism, thread_name_prefix="deepspeed aio")
        self._running: list[tuple[int, list[Future[None]]]] = []
        self._locked: dict[int, torch.Tensor] = {}

    def get_block_size(self) -> int:
        """Returns the bytes of one request."""
        return self._settings[0]

    def get_queue_depth(self) -> int:
        """Returns the requests in flight per unit of parallelism."""
        return self._settings[1]

    def get_single_submit(self) -> bool:
        """Returns ``single_submit`` as it was given."""
        return self._settings[2]

    def get_overlap_events(self) -> bool:
        """Returns ``overlap_events`` as it was given."""
        return self._settings[3]

    def get_intra_op_parallelism(self) -> int:
        """Returns the factor of ``queue_depth``."""
        return self._settings[4]

    def get_alignment(self) -> int:
        """Returns the bytes to whose multiples sizes should be rounded: a page."""
        return PAGE

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Returns an uninitialized 1-D tensor in host memory, page-locked where an accelerator benefits.

        Args:
            example_tensor: A tensor of its dtype.
        """
        nbytes = num_elem * example_tensor.element_size()
        pages = page_buffer(max(PAGE, round_to_pages(nbytes)), pin=may_pin(True))
        self._locked[pages.data_ptr()] = pages
        return pages[:nbytes].view(example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Frees a 1-D tensor of :meth:`new_cpu_locked_tensor`; returns False for any other tensor."""
        return self._locked.pop(locked_tensor.data_ptr(), None) is not None

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Starts to read into ``buffer``, of any shape, from byte ``file_offset`` of a file. Returns 0."""
        return self._start(os.preadv, buffer, filename, os.O_RDONLY, file_offset)

    def async_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Starts to write ``buffer``, of any shape, at byte ``file_offset`` of a file, made if missing. Returns 0."""
        return self._start(os.pwritev, buffer, filename, os.O_WRONLY | os.O_CREAT, file_offset)

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Reads into ``buffer``, of any shape, and waits for everything that was started; returns as :meth:`wait`."""
        self.async_pread(buffer, filename, file_offset)
        return self.wait()

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Writes ``buffer``, of any shape, and waits for everything that was started; returns as :meth:`wait`."""
        self.async_pwrite(buffer, filename, file_offset)
        return self.wait()

    def pread(self, buffer: torch.Tensor, filename: str, validate: bool, is_async: bool, file_offset: int = 0) -> int:
        """Reads into ``buffer``, of any shape; every read is checked. With ``is_async`` returns 0."""
        return (self.async_pread if is_async else self.sync_pread)(buffer, filename, file_offset)

    def pwrite(self, buffer: torch.Tensor, filename: str, validate: bool, is_async: bool, file_offset: int = 0) -> int:
        """Writes ``buffer``, of any shape; every write is checked. With ``is_async`` returns 0."""
        return (self.async_pwrite if is_async else self.sync_pwrite)(buffer, filename, file_offset)

    def read(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Reads into ``buffer``, of any shape; returns 0."""
        self.sync_pread(buffer, filename, file_offset)
        return 0

    def write(self, buffer: torch.Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Writes ``buffer``, of any shape; returns 0."""
        self.sync_pwrite(buffer, filename, file_offset)
        return 0

    def wait(self) -> int:
        """Blocks until everything that was started is complete; returns the number of reads and writes.

        Raises:
            OffloadError: One of them failed; all are complete or have failed.
        """
        running, self._running = self._running, []
        errors = []
        for handle, blocks in running:
            errors += [error for block in blocks if (error := block.exception()) is not None]
            os.close(handle)
        if errors:
            raise errors[0]
        return len(running)

    def _start(self, call: Callable[..., int], buffer: torch.Tensor, filename: str, flags: int, offset: int) -> int:
        if buffer.device.type != "cpu" or not buffer.is_contiguous():
            raise OffloadError(
                f"aio_handle: expected a contiguous tensor in host memory for {filename}, found one on {buffer.device} "
                f"with strides {buffer.stride()}; copy it there with .contiguous().cpu() first"
            )
        try:
            handle = os.open(filename, flags | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise OffloadError(f"{filename}: cannot be opened ({error.strerror}); check the path") from error
        view = memoryview(buffer.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        blocks = [
            self._pool.submit(_move, call, handle, view[start : start + self._settings[0]], offset + start, filename)
            for start in range(0, len(view), self._settings[0])
        ]
        self._running.append((handle, blocks))
        return 0


def _move(call: Callable[..., int], handle: int, view: memoryview, offset: int, filename: str) -> None:
    done = 0
    while done < len(view):
        try:
            moved = call(handle, [view[done:]], offset + done)
        except OSError as error:
            raise OffloadError(f"{filename}: {error.strerror} (errno {error.errno}); check the disk") from error
        if moved == 0:
            raise OffloadError(
                f"{filename}: expected {len(view) - done} bytes from {offset + done} on, found the end of the file; "
                "read with a tensor of the size that was written"
            )
        done += moved


def aio_read(buffer: torch.Tensor, filename: str, *settings: Any) -> int:
    """Reads a file into ``buffer``, of any shape; the settings are those of :class:`aio_handle`. Returns 0."""
    return aio_handle(*settings[:5]).read(buffer, filename, False)


def aio_write(buffer: torch.Tensor, filename: str, *settings: Any) -> int:
    """Writes ``buffer``, of any shape, to a file; the settings are those of :class:`aio_handle`. Returns 0."""
    return aio_handle(*settings[:5]).write(buffer, filename, False)


def deepspeed_memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    """Copies ``src``, of any shape, to a tensor of as many elements in host memory; returns 0."""
    dest.view(-1).copy_(src.view(-1))
    return 0
