"""A directory of one rank of one run, removed at its end.

The owner holds an advisory lock on a file beside the directory for as long as it lives; the kernel drops the lock when
the process dies, however it dies. So a later run that can take the lock knows for certain that the owner is gone, and
removes what it left. Directories of other hosts are never touched: on a shared file system locks may not reach us.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import socket
import weakref
from pathlib import Path

from deepspeed.errors import OffloadError
from deepspeed.logging import log_dist

_PREFIX = "deepspeed-offload"
_numbers = itertools.count()


class RunDirectory:
    """Makes a directory that belongs to this process alone.

    Args:
        parent: Folder to put it in; made if missing; may be relative.
        rank: Global rank, for the name.
        purpose: What it holds, for the name.

    Attributes:
        path: Its absolute path.

    Raises:
        OffloadError: It cannot be made.
    """

    def __init__(self, parent: str | os.PathLike[str], *, rank: int, purpose: str) -> None:
        folder = Path(parent).expanduser().absolute()
        host = _host()
        name = f"{_PREFIX}-{host}-{os.getpid()}-rank{rank}-{purpose}-{next(_numbers)}"
        self.path = folder / name
        lock = -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder, host)
            lock = _locked(_lock_path(self.path))
            self.path.mkdir(mode=0o700)
        except OSError as error:
            _remove(self.path, lock, os.getpid())
            raise OffloadError(
                f"nvme_path {folder}: cannot make the folder {name} in it ({error.strerror or error}); choose a path "
                "on a writable local disk"
            ) from error
        # Also when the process exits, or nobody refers to this object any more.
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def remove(self) -> None:
        """Deletes the directory with everything in it. May be called twice, and does nothing in a forked child."""
        self._finalizer()


def _remove(path: Path, lock: int, owner: int) -> None:
    if lock < 0 or os.getpid() != owner:
        return
    shutil.rmtree(path, ignore_errors=True)
    _lock_path(path).unlink(missing_ok=True)
    os.close(lock)


def remove_leftovers(folder: Path, host: str | None = None) -> None:
    """Removes directories in ``folder`` whose owner on this host has died."""
    for lock in folder.glob(f"{_PREFIX}-{host or _host()}-*.lock"):
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # its owner has just removed it
            continue
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):  # another user's
                continue
            raise
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            left = lock.with_suffix("")
            if left.is_dir():
                log_dist(f"nvme_path {folder}: removing {left.name}, left by a process that has died")
                shutil.rmtree(left, ignore_errors=True)
            lock.unlink(missing_ok=True)
        finally:
            os.close(handle)


def _locked(path: Path) -> int:
    """Makes the file and locks it; a handle that holds the lock until it is closed."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                return handle
        except FileNotFoundError:
            pass  # somebody cleaned up between making and locking it: make it again
        os.close(handle)


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _host() -> str:
    return "".join(c if c.isalnum() else "_" for c in socket.gethostname()) or "host"
