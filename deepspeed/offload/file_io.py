"""Reads and writes one file by many small requests on threads.

``os.preadv`` and ``os.pwritev`` release the interpreter lock, so a few threads keep the disk busy during training. If
the file system supports direct access, data moves between the disk and page-aligned buffers without the page cache,
which would copy it and evict other data.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.errors import OffloadError
from deepspeed.logging import warn_once
from deepspeed.offload.pinned import PAGE

_LACK_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class IoSettings:
    """The settings of reads and writes, from the section ``aio``."""

    block_size: int = 1 << 20  # bytes of one request, rounded up to pages
    queue_depth: int = 8  # number of requests in flight, per unit of ``threads``
    # factor of ``queue_depth``: ``queue_depth * threads`` requests are in flight, each on its own thread
    threads: int = 1
    direct: bool = True  # bypass the page cache if the file system supports it


class Transfer:
    """A read or write in flight. Its buffer must not be changed until :meth:`wait` has returned."""

    def __init__(self, requests: list[Future[None]]) -> None:
        self._requests = requests

    def wait(self) -> None:
        """Blocks until the transfer is complete; may be repeated. Raises OffloadError: the disk failed or is full."""
        requests, self._requests = self._requests, []
        errors = [error for request in requests if (error := request.exception()) is not None]
        if errors:
            raise errors[0]


class BlockFile:
    """A new file that is read and written in whole pages. ``path``: the path of the file; it must not exist.

    Raises:
        OffloadError: The file cannot be created.
    """

    def __init__(self, path: Path, settings: IoSettings) -> None:
        self.path = path
        self.size = 0
        self._block = -(-settings.block_size // PAGE) * PAGE
        self._pool = ThreadPoolExecutor(
            max_workers=settings.queue_depth * settings.threads, thread_name_prefix=f"deepspeed {path.name}"
        )
        self.handle = -1
        self._direct: int | None = None
        try:
            self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OffloadError(f"{path}: cannot be created ({error.strerror}); check nvme_path") from error
        self._direct = self._open_direct() if settings.direct else None

    def __del__(
        self,
    ) -> None:  # for engines that were not destroyed; no request is pending, as one would keep this object alive
        self.close()

    def _open_direct(self) -> int | None:
        if not hasattr(os, "O_DIRECT"):
            return None
        try:
            return os.open(self.path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return None

    @property
    def is_direct(self) -> bool:
        """Whether data bypasses the page cache."""
        return self._direct is not None

    def grow(self, nbytes: int) -> int:
        """Appends ``nbytes`` (whole pages) of zeros, and reserves the disk space for them.

        Returns:
            Their offset in the file, in bytes.

        Raises:
            OffloadError: The disk does not have enough space.
        """
        start = self.size
        if nbytes == 0:
            return start
        check_space(self.path, nbytes)
        try:
            os.posix_fallocate(self.handle, start, nbytes)
        except OSError as error:
            raise _explained(error, "reserving space in", self.path, nbytes) from error
        self.size += nbytes
        return start

    def map(self, offset: int, nbytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``numel`` elements at ``offset`` as a 1-D tensor that is mapped from the file.

        Args:
            offset: In bytes, a multiple of the page size.

        Raises:
            OSError: The system cannot map the file.
        """
        mapped = mmap.mmap(self.handle, nbytes, flags=mmap.MAP_SHARED, offset=offset)
        with torch.inference_mode(False):
            return torch.frombuffer(mapped, dtype=dtype, count=numel)

    def expect(self, offset: int, nbytes: int) -> None:
        """Advises the system to read these bytes into the page cache, as they will be read soon."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read(self, buffer: torch.Tensor, offset: int) -> Transfer:
        """Starts to read from ``offset`` of the file into ``buffer``.

        Args:
            buffer: 1-D uint8, whole pages on a page boundary.
            offset: In bytes, a multiple of the page size.
        """
        return self._start(os.preadv, buffer, offset, "reading")

    def write(self, buffer: torch.Tensor, offset: int) -> Transfer:
        """Starts to write ``buffer`` to ``offset`` of the file.

        Args:
            buffer: 1-D uint8, whole pages on a page boundary.
            offset: In bytes, a multiple of the page size.
        """
        return self._start(os.pwritev, buffer, offset, "writing")

    def _start(self, call: Callable[..., int], buffer: torch.Tensor, offset: int, what: str) -> Transfer:
        assert buffer.numel() % PAGE == 0 and offset % PAGE == 0 and buffer.data_ptr() % PAGE == 0
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]  # arrays are buffers
        return Transfer(
            [
                self._pool.submit(self._request, call, view[start : start + self._block], offset + start, what)
                for start in range(0, len(view), self._block)
            ]
        )

    def _request(self, call: Callable[..., int], view: memoryview, offset: int, what: str) -> None:
        done = 0
        while done < len(view):
            direct = self._direct
            try:
                moved = call(self.handle if direct is None else direct, [view[done:]], offset + done)
            except OSError as error:
                if direct is not None and error.errno == errno.EINVAL:
                    self._direct = None  # the file system opens files for direct access, but does not support it
                    warn_once(
                        f"direct:{self.path.parent}",
                        f"{self.path}: the file system has no direct access; using the page cache",
                    )
                    continue
                raise _explained(error, what, self.path, len(view) - done) from error
            if moved == 0:
                raise OffloadError(
                    f"{what} {self.path}: the file ends {len(view) - done} bytes too early, as another process has "
                    "changed it; start the run again"
                )
            done += moved

    def close(self) -> None:
        """Waits for requests and closes the file. May be called twice."""
        self._pool.shutdown(wait=True)
        for handle in {self.handle, self._direct} - {None, -1}:
            os.close(handle)  # type: ignore[arg-type]
        self.handle, self._direct = -1, None


def free_bytes(path: Path) -> int:
    """Returns the free bytes that this user may write on the file system of ``path``."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def check_space(path: Path, nbytes: int) -> None:
    """Checks that the file system of ``path`` has ``nbytes`` free. Raises OffloadError: it has fewer free bytes."""
    free = free_bytes(path.parent)
    if free < nbytes:
        raise OffloadError(
            f"{path}: expected {nbytes:,} free bytes, found {free:,}; free some space or choose another nvme_path"
        )


def _explained(error: OSError, what: str, path: Path, nbytes: int) -> OffloadError:
    if error.errno in _LACK_OF_SPACE:
        return OffloadError(
            f"{what} {path}: the disk is full: {nbytes:,} bytes are needed, {free_bytes(path.parent):,} are free. "
            "Free some space or choose another nvme_path"
        )
    return OffloadError(f"{what} {path} failed: {error.strerror} (errno {error.errno}); check the disk")
