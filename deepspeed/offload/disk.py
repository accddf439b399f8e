"""The disk that offloaded states go to: folders and files of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from deepspeed.offload.file_io import BlockFile, IoSettings
from deepspeed.offload.run_directory import RunDirectory


class Disk:
    """Makes folders and files on the file systems of this host."""

    def folder(self, parent: str, *, rank: int, purpose: str) -> RunDirectory:
        """Returns a folder of this run; see :class:`RunDirectory`."""
        return RunDirectory(parent, rank=rank, purpose=purpose)

    def file(self, path: Path, settings: IoSettings) -> BlockFile:
        """Returns a file in it; see :class:`BlockFile`."""
        return BlockFile(path, settings)


_HOST = Disk()
_disk: ContextVar[Disk] = ContextVar("disk", default=_HOST)


@contextmanager
def disk_is(disk: Disk) -> Iterator[None]:
    """Inside, this thread makes folders and files on ``disk``."""
    token = _disk.set(disk)
    try:
        yield
    finally:
        _disk.reset(token)


def open_folder(parent: str, *, rank: int, purpose: str) -> RunDirectory:
    """Makes a folder for one rank of this run.

    Args:
        parent: Where.
        rank: Global rank, for its name.
        purpose: What it holds, for its name.

    Raises:
        OffloadError: It cannot be made.
    """
    return _disk.get().folder(parent, rank=rank, purpose=purpose)


def open_file(path: Path, settings: IoSettings) -> BlockFile:
    """Makes a file.

    Args:
        path: Its name; it must not exist.
        settings: Sizes and numbers of requests.

    Raises:
        OffloadError: It cannot be made.
    """
    return _disk.get().file(path, settings)
