"""Writes safetensors files as a stream: header first, then one tensor after the other, with checksums on the way.

Nothing is buffered: host tensors are written directly, device tensors through two small staging buffers. A second
thread computes the checksums while the bytes are written to the disk.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from deepspeed.checkpoint import disk
from deepspeed.checkpoint.format import CHUNK_BYTES, TORCH, NamedTensor, SavedFile, SavedRun, safetensors_header
from deepspeed.errors import CheckpointError
from deepspeed.logging import logger
from deepspeed.offload.pinned import may_pin, page_buffer
from deepspeed.zero.storage import dense

_STAGING_BYTES = 16 << 20
_NICER = 10  # at equal niceness, three threads on two processors made steps 1.7 times as long; at 10, 1.1 times


@dataclass(frozen=True)
class BucketRun:
    """Values of elements ``[start, stop)`` of the flat buffer of bucket ``bucket``."""

    bucket: int  # index of the bucket
    start: int  # first element
    stop: int  # one past the last
    values: Iterable[torch.Tensor]  # yields the elements in order, as 1-D contiguous tensors on any device
    dtype: torch.dtype  # their dtype


class ChunkedStream:
    """Writes bytes to a file, with a CRC-32 per chunk. The writing thread passes ``note`` the bytes of each write."""

    def __init__(
        self, descriptor: int, crc_pool: ThreadPoolExecutor, note: Callable[[int], None] | None = None
    ) -> None:
        self._descriptor = descriptor
        self._pool = crc_pool
        self._note = note
        self._checksums: list[int] = []
        self._crc = 0
        self._pending: deque[tuple[Future[None], object]] = deque()
        self.size = 0

    def write(self, data: memoryview, owner: object = None) -> Future[None] | None:
        """Writes ``data``, unchanged until the future is done; ``owner``, if given, keeps its memory alive."""
        last: Future[None] | None = None
        while data:
            space = CHUNK_BYTES - self.size % CHUNK_BYTES
            part, data = data[:space], data[space:]
            last = self._pool.submit(self._checksum, part, len(part) == space)
            self._pending.append((last, owner))
            disk.write_all(self._descriptor, part)
            self.size += len(part)
            if self._note is not None:
                self._note(len(part))
            while self._pending and self._pending[0][0].done():
                self._release_oldest()
        return last

    def _release_oldest(self) -> None:
        self._pending[0][0].result()  # before its memory is released
        self._pending.popleft()

    def _checksum(self, part: memoryview, closes_chunk: bool) -> None:
        """Runs in the pool's one thread, in order."""
        self._crc = zlib.crc32(part, self._crc)
        if closes_chunk:
            self._checksums.append(self._crc)
            self._crc = 0

    def finish(self) -> tuple[int, ...]:
        """Waits for the checksums and returns them."""
        while self._pending:
            self._release_oldest()
        if self.size % CHUNK_BYTES:
            self._checksums.append(self._crc)
        return tuple(self._checksums)


class _Staging:
    """Two host buffers through which device tensors are sent."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self._in_use: list[Future[None] | None] = [None, None]
        self._turn = 0

    def pass_through(self, values: torch.Tensor, stream: ChunkedStream) -> None:
        raw = values.view(torch.uint8)
        if not self._buffers:
            self._buffers = [page_buffer(_STAGING_BYTES, pin=may_pin(True)) for _ in range(2)]
        for start in range(0, raw.numel(), _STAGING_BYTES):
            part = raw[start : start + _STAGING_BYTES]
            turn = self._turn
            self._turn ^= 1
            busy = self._in_use[turn]
            if busy is not None:
                busy.result()
            buffer = self._buffers[turn][: part.numel()]
            buffer.copy_(part)
            self._in_use[turn] = stream.write(disk.bytes_of(buffer), buffer)


class SaveProgress:
    """Logs how much of ``total`` bytes of tensors a rank has written, every 15 seconds; short saves log nothing."""

    seconds = 15.0

    def __init__(self, tag: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._tag, self._total, self._clock = tag, total, clock
        self._written = 0
        self._start = self._last = clock()

    def add(self, nbytes: int) -> None:
        """Adds to the bytes written so far, and logs the progress where it is due."""
        self._written += nbytes
        now = self._clock()
        if now - self._last < self.seconds:
            return
        self._last = now
        spent = now - self._start
        left = max(self._total - self._written, 0) * spent / self._written
        logger.info(
            "saving %s: rank 0 has written %.1f of %.1f GB in %.0f s, about %.0f s are left",
            self._tag, self._written / 1e9, self._total / 1e9, spent, left,
        )  # fmt: skip


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file that is being written."""

    name: str  # its name in the file
    dtype: torch.dtype  # the dtype of the elements
    shape: tuple[int, ...]
    values: Iterable[torch.Tensor]  # yields the elements in order, in parts

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * self.dtype.itemsize


class FileWriter:
    """Writes the files of one rank into a folder. A context manager: it owns the threads, and syncs before it ends.

    A file goes to the disk while the next one is copied to the kernel.
    """

    def __init__(self, folder: Path, note: Callable[[int], None] | None = None) -> None:
        self.folder = folder
        self._note = note
        self._pool = ThreadPoolExecutor(1, "checkpoint-crc")
        self._sync_pool = ThreadPoolExecutor(1, "checkpoint-sync")
        self._syncing: list[Future[None]] = []
        self._staging = _Staging()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        self._pool.shutdown()
        self._sync_pool.shutdown()
        if kind is None:  # otherwise the block's error takes precedence
            for synced in self._syncing:
                synced.result()

    def write_runs(self, name: str, kind: str, runs: Sequence[BucketRun]) -> SavedFile:
        """Writes runs of buckets; each becomes a 1-D tensor named ``<bucket>:<start>``."""
        entries = [FileTensor(f"{s.bucket}:{s.start}", s.dtype, (s.stop - s.start,), s.values) for s in runs]
        offsets, size, checksums = self._write(name, entries)
        saved = tuple(
            SavedRun(s.bucket, s.start, s.stop, s.dtype, offset) for s, offset in zip(runs, offsets, strict=True)
        )
        return SavedFile(name, kind, size, checksums, runs=saved)

    def write_tensors(self, name: str, kind: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> SavedFile:
        """Writes whole tensors, of any shape, under their names."""
        entries = [FileTensor(key, t.dtype, tuple(t.shape), (dense(t.detach()).view(-1),)) for key, t in tensors]
        offsets, size, checksums = self._write(name, entries)
        records = tuple(NamedTensor(e.name, e.shape, e.dtype, o) for e, o in zip(entries, offsets, strict=True))
        return SavedFile(name, kind, size, checksums, tensors=records)

    def write_bytes(self, name: str, data: bytes) -> SavedFile:
        """Writes a file of torch as it is."""

        def fill(stream: ChunkedStream) -> None:
            stream.write(memoryview(data))

        size, checksums = self._stream(name, fill)
        return SavedFile(name, TORCH, size, checksums)

    def _write(self, name: str, entries: Sequence[FileTensor]) -> tuple[list[int], int, tuple[int, ...]]:
        header = safetensors_header([(e.name, e.dtype, e.shape) for e in entries])
        offsets, position = [], len(header)
        for entry in entries:
            offsets.append(position)
            position += entry.nbytes

        def fill(stream: ChunkedStream) -> None:
            stream.write(memoryview(header))
            for entry, offset in zip(entries, offsets, strict=True):
                for part in entry.values:
                    self._put(part, stream)
                if stream.size != offset + entry.nbytes:
                    raise CheckpointError(f"{name}: {entry.name} does not have as many bytes as its shape needs")

        size, checksums = self._stream(name, fill)
        return offsets, size, checksums

    def _stream(self, name: str, fill: Callable[[ChunkedStream], None]) -> tuple[int, tuple[int, ...]]:
        with disk.unsynced_file(self.folder / name) as descriptor:
            stream = ChunkedStream(descriptor, self._pool, self._note)
            fill(stream)
            checksums = stream.finish()
        self._syncing.append(self._sync_pool.submit(disk.sync_and_close, descriptor))
        return stream.size, checksums

    def _put(self, part: torch.Tensor, stream: ChunkedStream) -> None:
        part = part.detach()
        if part.device.type == "cpu":
            stream.write(disk.bytes_of(part), part)
        else:
            self._staging.pass_through(part, stream)


def lower_priority() -> None:
    """Lowers the priority of the calling thread, which threads that it starts inherit.

    Training then has priority on the processor. Only Linux has priorities of threads.
    """
    if sys.platform == "linux":
        this_thread = 0  # of PRIO_PROCESS; Linux counts threads as processes here
        niceness = os.getpriority(os.PRIO_PROCESS, this_thread)
        os.setpriority(os.PRIO_PROCESS, this_thread, min(niceness + _NICER, 19))


class SavePace:
    """Keeps a save in the background off the processor for half of its time, until the program waits for the save.

    Training and the threads of a save share processors, caches and the interpreter's lock. A thread that is nicer by 10
    and never rests takes a tenth of the processor that it shares.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._last = 0.0
        self._awaited = threading.Event()

    def rest(self) -> None:
        """Sleeps as long as the calling thread has worked since the last call; not at all once the save is awaited."""
        now = self._clock()
        self._awaited.wait(max(now - self._last, 0.0))
        self._last = now

    def hurry(self) -> None:
        """Ends a rest, and all later ones. Callable from any thread."""
        self._awaited.set()
