"""Reads tensors out of a checkpoint of this package: only the bytes asked for, and the checksums that cover them."""

from __future__ import annotations

import bisect
import os
import stat
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from deepspeed.checkpoint.disk import bytes_of
from deepspeed.checkpoint.format import BUFFERS, CHUNK_BYTES, COMPUTE, MASTER, Manifest, NamedTensor, Piece, SavedFile
from deepspeed.checkpoint.source import SavedBuffer, SavedParameter, Wanted
from deepspeed.errors import CheckpointError

_THREADS = 4
_STAGING_NUMEL = 1 << 22


class FileReader:
    """Random access to one file of a checkpoint, by ``pread``: a file that shrinks under it is an error, not a crash.

    Args:
        folder: The tag folder.
        record: What the manifest says about the file.
    """

    def __init__(self, folder: Path, record: SavedFile) -> None:
        self._descriptor: int | None = None
        self.path = folder / record.name
        self.record = record
        self._verified: set[int] = set()

    def open(self) -> int:
        """The descriptor; opened at the first call.

        Raises:
            CheckpointError: The file is missing, is no plain file, or has another size than when it was written.
        """
        if self._descriptor is None:
            try:
                # Opening a named pipe would block without O_NONBLOCK.
                self._descriptor = os.open(
                    self.path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
                )
            except FileNotFoundError:
                raise CheckpointError(
                    f"{self.path} is missing; the checkpoint is damaged. Use another tag, or copy the file again from "
                    "where it was written"
                ) from None
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be opened ({error.strerror})") from error
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{self.path} is not a plain file; the checkpoint was altered")
            size = status.st_size
            if size != self.record.size:
                raise CheckpointError(
                    f"{self.path} has {size} bytes, but {self.record.size} were written; it was cut off or altered. "
                    "Use another tag, or copy the file again from where it was written"
                )
        return self._descriptor

    def close(self) -> None:
        """Lets go of the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:  # tensors that are read when they are asked for have no other end
        self.close()

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills ``out`` from byte ``offset`` on."""
        descriptor = self.open()
        while out:
            try:
                count = _read_at(descriptor, out, offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read ({error.strerror})") from error
            if count == 0:
                raise CheckpointError(f"{self.path} ended at byte {offset} while it was being read")
            out, offset = out[count:], offset + count

    def chunks_of(self, start: int, stop: int) -> range:
        """The chunks that bytes ``[start, stop)`` touch."""
        return range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES))

    def verify(self, chunk: int) -> None:
        """Compares the checksum of one chunk.

        Raises:
            CheckpointError: It differs.
        """
        if chunk in self._verified:
            return
        start = chunk * CHUNK_BYTES
        data = bytearray(min(CHUNK_BYTES, self.record.size - start))
        self.read_into(start, memoryview(data))
        if zlib.crc32(data) != self.record.checksums[chunk]:
            raise CheckpointError(
                f"{self.path}: bytes {start} to {start + len(data)} are not what was written (checksum mismatch); the "
                "file is damaged. Use another tag, or copy the file again from where it was written. "
                "checkpoint.verify_checksums: false reads it as it is"
            )
        self._verified.add(chunk)

    def whole(self) -> bytes:
        """The whole file, verified."""
        for chunk in range(len(self.record.checksums)):
            self.verify(chunk)
        data = bytearray(self.record.size)
        self.read_into(0, memoryview(data))
        return bytes(data)


def _read_at(descriptor: int, out: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [out], offset)
    data = os.pread(descriptor, min(len(out), CHUNK_BYTES), offset)
    out[: len(data)] = data
    return len(data)


class CheckpointReader:
    """The tensors of one tag folder, as a :class:`~deepspeed.checkpoint.source.Source`.

    Args:
        folder: The tag folder.
        verify: Whether :meth:`check` compares checksums.

    Attributes:
        manifest: What the folder should hold.
    """

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.folder = folder
        self.label = str(folder)
        self.manifest = Manifest.read(folder)
        self._verify = verify
        self._files = {record.name: FileReader(folder, record) for record in self.manifest.files}
        self._pieces = self._index_pieces()
        self._buffers = {
            tensor.name: (self._files[record.name], tensor)
            for record in self.manifest.files
            if record.kind == BUFFERS
            for tensor in record.tensors
        }
        self.aliases = self.manifest.aliases
        self.left_out = self.manifest.left_out
        self.parameters = {name: self._parameter(name) for name in self.manifest.by_name if name not in self.left_out}
        self.buffers = {
            name: SavedBuffer(name, tensor.shape, tensor.dtype) for name, (_, tensor) in self._buffers.items()
        }

    def close(self) -> None:
        """Lets go of all files."""
        for reader in self._files.values():
            reader.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _index_pieces(self) -> dict[tuple[str, int], list[tuple[Piece, FileReader]]]:
        found: dict[tuple[str, int], list[tuple[Piece, FileReader]]] = defaultdict(list)
        for record in self.manifest.files:
            for piece in record.pieces:
                found[(record.kind, piece.bucket)].append((piece, self._files[record.name]))
        for (kind, bucket), pieces in found.items():
            pieces.sort(key=lambda entry: entry[0].start)
            for (first, _), (second, reader) in zip(pieces, pieces[1:], strict=False):
                if second.start < first.stop:
                    raise CheckpointError(f"{reader.path}: {kind} of bucket {bucket} is there twice; it is damaged")
        return found

    def _parameter(self, name: str) -> SavedParameter:
        bucket, _ = self.manifest.by_name[name]
        tile, start = self.manifest.tile(name), self.manifest.start(name)
        kinds = {}
        for kind, index in self._pieces:
            if index == bucket and self._covers(kind, bucket, start, start + tile.numel):
                kinds[kind] = self._pieces[(kind, bucket)][0][0].dtype
        dtype = getattr(torch, self.manifest.buckets[bucket].dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self.folder}: parameter {name!r} has no known dtype; the checkpoint was altered")
        if tile.numel == 0:
            kinds.setdefault(COMPUTE, dtype)
        if MASTER not in kinds and COMPUTE not in kinds:
            raise CheckpointError(
                f"{self.folder}: the values of parameter {name!r} are not complete; the checkpoint is damaged. Use "
                "another tag, or copy it again from where it was written"
            )
        return SavedParameter(name, tile.shape, kinds, name in self.manifest.frozen, dtype)

    def _covers(self, kind: str, bucket: int, start: int, stop: int) -> bool:
        position = start
        for piece, _ in self._overlapping(kind, bucket, start, stop):
            if piece.start > position:
                return False
            position = piece.stop
        return position >= stop

    def _overlapping(self, kind: str, bucket: int, start: int, stop: int) -> Iterator[tuple[Piece, FileReader]]:
        pieces = self._pieces.get((kind, bucket), [])
        first = bisect.bisect_right(pieces, start, key=lambda entry: entry[0].stop)
        for piece, reader in pieces[first:]:
            if piece.start >= stop:
                return
            yield piece, reader

    def _extents(self, wanted: Wanted) -> Iterator[tuple[int, int, Piece, FileReader, int]]:
        """``(first, last, piece, file, byte offset)`` for each part of ``wanted`` that exists."""
        bucket, _ = self.manifest.by_name[wanted.name]
        base = self.manifest.start(wanted.name)
        for piece, reader in self._overlapping(wanted.kind, bucket, base + wanted.start, base + wanted.stop):
            first, last = max(piece.start - base, wanted.start), min(piece.stop - base, wanted.stop)
            offset = piece.offset + (base + first - piece.start) * piece.dtype.itemsize
            yield first, last, piece, reader, offset

    # -- the source ----------------------------------------------------------------------------------------------------

    def check(self, wanted: Sequence[Wanted]) -> None:
        """See :class:`~deepspeed.checkpoint.source.Source`."""
        chunks: dict[FileReader, set[int]] = defaultdict(set)
        for entry in wanted:
            for first, last, piece, reader, offset in self._extents(entry):
                chunks[reader].update(reader.chunks_of(offset, offset + (last - first) * piece.dtype.itemsize))
        for reader, tensor in self._buffers.values():
            chunks[reader].update(reader.chunks_of(tensor.offset, tensor.offset + tensor.nbytes))
        for reader in chunks:
            reader.open()
        if self._verify:
            work = [(reader, chunk) for reader, numbers in chunks.items() for chunk in sorted(numbers)]
            with ThreadPoolExecutor(_THREADS, "checkpoint-verify") as pool:
                for _ in pool.map(lambda item: item[0].verify(item[1]), work):
                    pass

    def covered(self, wanted: Wanted) -> list[tuple[int, int]]:
        """See :class:`~deepspeed.checkpoint.source.Source`."""
        return [(first, last) for first, last, *_ in self._extents(wanted)]

    def read(self, wanted: Wanted, out: torch.Tensor) -> None:
        """See :class:`~deepspeed.checkpoint.source.Source`."""
        position = wanted.start
        for first, last, piece, reader, offset in self._extents(wanted):
            if first > position:
                break
            _copy(reader, offset, piece.dtype, out[first - wanted.start : last - wanted.start])
            position = last
        if position < wanted.stop:
            raise CheckpointError(f"{self.folder}: {wanted.kind} of {wanted.name!r} is not complete")

    def read_buffer(self, name: str) -> torch.Tensor:
        """See :class:`~deepspeed.checkpoint.source.Source`."""
        reader, tensor = self._buffers[name]
        return self._read_named(reader, tensor)

    @staticmethod
    def _read_named(reader: FileReader, tensor: NamedTensor) -> torch.Tensor:
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        if out.numel():
            reader.read_into(tensor.offset, bytes_of(out))
        return out

    def open_file(self, name: str) -> None:
        """Makes sure that the file ``name`` is there in its size.

        Raises:
            CheckpointError: It is not.
        """
        self._files[name].open()

    def read_file(self, name: str) -> bytes | None:
        """The whole of the small file ``name``, verified; None if the checkpoint has none of that name."""
        reader = self._files.get(name)
        return None if reader is None else reader.whole()

    def read_full(self, name: str, kinds: Iterable[str] = (MASTER, COMPUTE)) -> torch.Tensor:
        """The whole parameter ``name``, in its shape, of the first of ``kinds`` that it has."""
        parameter = self.parameters[name]
        kind = next(kind for kind in kinds if kind in parameter.kinds)
        out = torch.empty(parameter.numel, dtype=parameter.kinds[kind])
        self.read(Wanted(kind, name, 0, parameter.numel), out)
        return out.view(parameter.shape)


def _copy(reader: FileReader, offset: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Bytes of a file into ``out``: straight where it lies in host memory in the same dtype, else by a small buffer."""
    if out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous():
        reader.read_into(offset, bytes_of(out))
        return
    staging = torch.empty(min(_STAGING_NUMEL, out.numel()), dtype=dtype)
    for start in range(0, out.numel(), _STAGING_NUMEL):
        part = staging[: min(_STAGING_NUMEL, out.numel() - start)]
        reader.read_into(offset + start * dtype.itemsize, bytes_of(part))
        out[start : start + part.numel()].copy_(part)
