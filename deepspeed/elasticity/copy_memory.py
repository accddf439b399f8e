"""Shared host memory for copies. Other processes on the host can open it, also after its creator has exited.

A header in the memory holds the generation of the copy, so a process that has it open needs no message to know which
copy it contains.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import weakref
from typing import NamedTuple

import torch

from deepspeed.checkpoint.disk import bytes_of

HEADER = 64  # bytes
_GENERATION, _DATA, _TAIL = range(3)  # int64 words of the header
_TOKEN = slice(32, 48)  # bytes of the header
_NOTHING = -1


class MemoryAddress(NamedTuple):
    """Describes where another process finds a :class:`CopyMemory`."""

    host: str  # name of the host
    pid: int  # the process that made the memory
    file: int  # file descriptor of the memory in that process
    token: bytes  # random bytes in the header; another container may have a process and descriptor with equal numbers


class CopyMemory:
    """Host memory for one copy: a header, the values as bytes, and a tail that describes them.

    It has no name in any file system, so nothing is left behind. A process that has opened it can still read it after
    the process that made it was killed. Pages take memory only once they are written.

    Args:
        raw: All bytes, 1-D uint8.
        address: Where other processes find it; None: the system cannot share memory, so they cannot open it.
    """

    def __init__(self, raw: torch.Tensor, address: MemoryAddress | None) -> None:
        self._raw = raw
        self._words = bytes_of(raw)[:HEADER].cast("q")
        self.address = address

    @classmethod
    def allocate(cls, capacity: int) -> CopyMemory:
        """Returns memory for ``capacity`` bytes that holds no copy."""
        size = HEADER + capacity
        file = raw = address = None
        with contextlib.suppress(OSError, AttributeError):
            file = os.memfd_create("deepspeed-copy", os.MFD_CLOEXEC)
            os.ftruncate(file, size)
            raw = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
            address = MemoryAddress(socket.gethostname(), os.getpid(), file, secrets.token_bytes(16))
        made = cls(torch.empty(size, dtype=torch.uint8) if raw is None else raw, address)
        if file is not None:
            weakref.finalize(made, os.close, file)
        made.begin()
        if address is not None:
            bytes_of(made._raw)[_TOKEN] = address.token
        return made

    @classmethod
    def open(cls, address: MemoryAddress) -> CopyMemory | None:
        """Returns the memory of another process; None if this process cannot open it."""
        if address.host != socket.gethostname():
            return None
        try:
            file = os.open(f"/proc/{address.pid}/fd/{address.file}", os.O_RDWR)
        except OSError:
            return None
        try:
            raw = torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
        except (OSError, ValueError):  # ValueError: it has no bytes
            return None
        finally:
            os.close(file)
        if raw.numel() < HEADER or bytes(bytes_of(raw)[_TOKEN]) != address.token:
            return None
        return cls(raw, address)

    @property
    def capacity(self) -> int:
        """Size without the header, in bytes."""
        return self._raw.numel() - HEADER

    @property
    def generation(self) -> int | None:
        """The generation of the copy; None if there is no complete copy."""
        found = self._words[_GENERATION]
        return None if found == _NOTHING else found

    @property
    def lengths(self) -> tuple[int, int]:
        """Bytes of the values, and bytes of the tail."""
        return self._words[_DATA], self._words[_TAIL]

    @property
    def data(self) -> torch.Tensor:
        """The values of the copy, 1-D uint8."""
        return self._raw[HEADER : HEADER + self._words[_DATA]]

    @property
    def tail(self) -> bytes:
        """The bytes that describe the values."""
        start = HEADER + self._words[_DATA]
        return bytes(bytes_of(self._raw)[start : start + self._words[_TAIL]])

    @property
    def content(self) -> torch.Tensor:
        """The values and the tail, 1-D uint8."""
        return self._raw[HEADER : HEADER + sum(self.lengths)]

    def begin(self, data: int = 0, tail: int = 0) -> torch.Tensor:
        """Drops the copy, and returns the memory for a new one of ``data + tail`` bytes, 1-D uint8."""
        self._words[_GENERATION] = _NOTHING
        self._words[_DATA], self._words[_TAIL] = data, tail
        return self.content

    def end(self, generation: int) -> None:
        """Marks the copy as complete."""
        self._words[_GENERATION] = generation
