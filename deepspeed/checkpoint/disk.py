"""All changes of files: complete writes, fsync of files and folders, renames.

A file or a rename is durable only if its folder entry is, so the folder is synced too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from deepspeed.checkpoint.directory import SAVING

try:
    import fcntl
except ImportError:  # not on Windows: then a left-over folder is recognized by its age alone
    fcntl = None  # type: ignore[assignment]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous host tensor, to read or to write, without a copy.

    The caller must keep the tensor alive. Does not use numpy: torch never resizes a storage that numpy has seen, and
    flat buffers of sharded parameters are freed by resizing.
    """
    nbytes = tensor.nbytes
    if nbytes == 0:
        return memoryview(b"")
    assert tensor.is_contiguous() and tensor.device.type == "cpu" and not (tensor.is_conj() or tensor.is_neg())
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")


def write_all(descriptor: int, data: memoryview) -> None:
    """Writes all of ``data`` (bytes) at the file's position."""
    while data:
        data = data[os.write(descriptor, data) :]


def _name_file(error: BaseException, path: Path) -> None:
    """Adds the file's name to an error of the system: errors of writes name only a descriptor."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = str(path)


@contextlib.contextmanager
def unsynced_file(path: Path) -> Iterator[int]:
    """Yields a descriptor of a new file, for :func:`sync_and_close` to finish. Removes the file if the block raises."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        yield descriptor
    except BaseException as error:
        _name_file(error, path)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def sync_and_close(descriptor: int) -> None:
    """Syncs a file to the disk, and closes it in any case."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Yields a descriptor of a new file. Syncs the file to the disk at the end of the block.

    Removes it if that raises.
    """
    with unsynced_file(path) as descriptor:
        yield descriptor
    try:
        sync_and_close(descriptor)
    except BaseException as error:
        _name_file(error, path)
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def replace_file(path: Path, data: bytes, *, executable: bool = False) -> None:
    """Gives ``path`` the content ``data`` in one step: readers see the old content or the new one."""
    beside = path.with_name(SAVING + path.name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside)
    with new_file(beside) as descriptor:
        write_all(descriptor, memoryview(data))
        if executable:
            os.fchmod(descriptor, os.fstat(descriptor).st_mode | 0o111)
    try:
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise
    sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Renames a folder durably."""
    os.rename(source, target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def sync_folder(folder: Path) -> None:
    """Syncs the entries of ``folder`` to the disk."""
    sync_and_close(os.open(folder, os.O_RDONLY))


def make_folder(folder: Path) -> None:
    """Makes ``folder`` and missing parents, durably."""
    missing = [folder]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for path in reversed(missing):
        if not path.is_dir():
            os.makedirs(path, exist_ok=True)
            sync_folder(path.parent)


def remove_folder(folder: Path) -> None:
    """Removes ``folder`` with its content, or the link that is there; does nothing if it is missing."""
    with contextlib.suppress(FileNotFoundError):
        if folder.is_symlink():
            os.unlink(folder)
        else:
            shutil.rmtree(folder)


class FolderLock:
    """A lock of a process that works in a folder. The system releases it whenever the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path  # the lock file
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Takes the lock if it is free; returns whether it did. It counts as free in a file system without locks."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            except OSError:  # no locks on this file system
                os.close(descriptor)
                return True
        self._descriptor = descriptor
        return True

    @property
    def is_held(self) -> bool:
        """Returns whether this object has the lock, on a file system that has locks."""
        return self._descriptor is not None

    def release(self) -> None:
        """Releases the lock; does nothing without it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
