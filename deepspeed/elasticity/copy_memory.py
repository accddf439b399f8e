"""Host memory of copies, which another process of the same host can open: its end does not take it away."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import weakref
from typing import NamedTuple

import torch

_serials = itertools.count()


class MemoryAddress(NamedTuple):
    """Describes where another process finds a :class:`CopyMemory`.

    Attributes:
        host: Its machine.
        pid: The process that made it.
        file: Its descriptor there.
        serial: Distinguishes it from all others that this process has made.
    """

    host: str
    pid: int
    file: int
    serial: int


class CopyMemory:
    """Host memory of one copy.

    It has no name in any file system, so nothing is left behind. A process that has opened it keeps it when the one
    that made it is killed.

    Args:
        size: Bytes.

    Attributes:
        data: The bytes, 1-D uint8.
        address: Where other processes find it; None: nowhere, as the system does not have such memory.
    """

    def __init__(self, size: int) -> None:
        self.address: MemoryAddress | None = None
        with contextlib.suppress(OSError, AttributeError):
            file = os.memfd_create("deepspeed-copy", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, file)
            os.ftruncate(file, size)
            if size:
                self.data = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
                self.address = MemoryAddress(socket.gethostname(), os.getpid(), file, next(_serials))
        if self.address is None:
            self.data = torch.empty(size, dtype=torch.uint8)


def open_memory(address: MemoryAddress, like: torch.Tensor) -> torch.Tensor | None:
    """Returns the memory of another process, 1-D uint8; None where this one cannot see it.

    Args:
        address: Where it is.
        like: What lies in it now, 1-D uint8: another container may have a process with the same number.
    """
    if address.host != socket.gethostname():
        return None
    try:
        file = os.open(f"/proc/{address.pid}/fd/{address.file}", os.O_RDWR)
    except OSError:
        return None
    try:
        found = torch.frombuffer(mmap.mmap(file, like.numel()), dtype=torch.uint8)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return found if torch.equal(found, like) else None
