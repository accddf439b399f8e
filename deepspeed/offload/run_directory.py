"""Creates directories for one rank of one run, and removes them when the run ends.

The owner holds an advisory lock on a file next to the directory while it lives; the kernel releases the lock when the
process ends in any way. So if a later run can take the lock, the owner has ended, and its files are removed. Only
directories of this kernel (by the boot identifier in the name) or of this host name are removed, as containers of one
machine have different names but one kernel. Those of other machines are kept, as their locks on a shared file system
may not be visible here. Directories that a container left before a reboot must be removed by hand.

Other users may be able to write to the folder. So a lock is always a new file, and files of other users are neither
followed nor waited for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import socket
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from deepspeed.errors import OffloadError
from deepspeed.logging import log_dist
from deepspeed.offload.file_io import BlockFile, IoSettings

_PREFIX = "deepspeed-offload"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_UNKNOWN_BOOT = "boot"
_MAX_TRIES = 1000
_numbers = itertools.count()


class RunDirectory:
    """A directory that only this process uses.

    Args:
        parent: The folder to create it in; created if missing; may be relative.

    Raises:
        OffloadError: The directory cannot be created.
    """

    def __init__(self, parent: str | os.PathLike[str], *, rank: int, purpose: str) -> None:
        folder = Path(parent).expanduser().absolute()
        name = f"{_PREFIX}-{_host()}-{_boot()}-{os.getpid()}-rank{rank}-{purpose}"
        self.path = folder / name  # its absolute path
        lock = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
            self.path, lock = _locked(self.path)
            self.path.mkdir(mode=0o700)
        except OSError as error:
            _remove(self.path, lock, os.getpid())
            raise OffloadError(
                f"nvme_path {folder}: cannot create the folder {name} in it ({error.strerror or error}); choose a path "
                "on a writable local disk"
            ) from error
        # Also runs at exit, and when this object is garbage-collected.
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        """Deletes the directory with its content. May be called twice, and does nothing in a forked child."""
        self._finalizer()


def _remove(path: Path, lock: int, owner: int) -> None:
    if lock < 0 or os.getpid() != owner:
        return
    shutil.rmtree(path, ignore_errors=True)
    _lock_path(path).unlink(missing_ok=True)
    os.close(lock)


def remove_leftovers(folder: Path) -> None:
    """Removes directories in ``folder`` whose owner on this machine has ended."""
    patterns = [f"{_PREFIX}-{_host()}-*.lock"]
    if _boot() != _UNKNOWN_BOOT:
        patterns.append(f"{_PREFIX}-*-{_boot()}-*.lock")
    for lock in sorted({lock for pattern in patterns for lock in folder.glob(pattern)}):
        handle = _open_own(lock)
        if handle is None:
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            left = lock.with_suffix("")
            if left.is_dir():
                log_dist(f"nvme_path {folder}: removing {left.name}, left by a process that has ended")
                shutil.rmtree(left, ignore_errors=True)
            lock.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _open_own(lock: Path) -> int | None:
    """Opens a lock and returns its handle; None if it is gone, or is not a file of this user."""
    try:
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # removed by its owner just now, another user's, a link or a directory
        return None
    status = os.fstat(handle)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return handle
    os.close(handle)
    return None


def _locked(path: Path) -> tuple[Path, int]:
    """Creates a lock; returns the path of its directory, ``path`` with a number, and a handle that holds the lock."""
    for _ in range(_MAX_TRIES):
        numbered = path.with_name(f"{path.name}-{next(_numbers)}")
        lock = _lock_path(numbered)
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:  # exists already: try the next number
            continue
        # Another process may have removed it as a leftover before it was locked.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not numbered.exists() and os.stat(lock).st_ino == os.fstat(handle).st_ino:
                return numbered, handle
        os.close(handle)
    raise FileExistsError(errno.EEXIST, f"{_MAX_TRIES} names of locks exist already", str(path))


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _boot() -> str:
    """Returns an identifier of this boot of the machine, the same in all its containers."""
    try:
        return _BOOT.read_text().strip().replace("-", "")[:16] or _UNKNOWN_BOOT
    except OSError:  # not Linux
        return _UNKNOWN_BOOT


def _host() -> str:
    return "".join(c if c.isalnum() else "_" for c in socket.gethostname()) or "host"


class Disk:
    """Creates folders and files on the file systems of this host."""

    def folder(self, parent: str, *, rank: int, purpose: str) -> RunDirectory:
        """Returns a new folder; see :class:`RunDirectory`."""
        return RunDirectory(parent, rank=rank, purpose=purpose)

    def file(self, path: Path, settings: IoSettings) -> BlockFile:
        """Returns a new file; see :class:`BlockFile`."""
        return BlockFile(path, settings)


_HOST = Disk()
_disk: ContextVar[Disk] = ContextVar("disk", default=_HOST)


@contextmanager
def use_disk(disk: Disk) -> Iterator[None]:
    """Makes this thread create folders and files on ``disk`` inside the context."""
    token = _disk.set(disk)
    try:
        yield
    finally:
        _disk.reset(token)


def open_folder(parent: str, *, rank: int, purpose: str) -> RunDirectory:
    """Creates and returns a folder for one rank of this run. Raises OffloadError: the folder cannot be created."""
    return _disk.get().folder(parent, rank=rank, purpose=purpose)


def open_file(path: Path, settings: IoSettings) -> BlockFile:
    """Creates and returns a file. ``path``: the path of the file; it must not exist.

    Raises:
        OffloadError: The file cannot be created.
    """
    return _disk.get().file(path, settings)
