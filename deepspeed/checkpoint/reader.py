"""Reads tensors out of a checkpoint of this package: only the bytes requested, and the checksums that cover them."""

from __future__ import annotations

import bisect
import os
import re
import stat
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from deepspeed.checkpoint.disk import bytes_of
from deepspeed.checkpoint.format import (
    BUFFERS,
    CHUNK_BYTES,
    COMPUTE,
    FOLDERS,
    MASTER,
    STORED_BY,
    Manifest,
    NamedTensor,
    SavedFile,
    SavedRun,
    SavedTile,
)
from deepspeed.checkpoint.source import CheckpointSource, SavedBuffer, SavedParameter, Wanted
from deepspeed.errors import CheckpointError
from deepspeed.zero.tiling.tiles import CommonRun, Tile, common_runs

_FILE_OF_RANK = re.compile(r"rank(\d+)-")
_THREADS = 4
_STAGING_NUMEL = 1 << 22
_GAP_BYTES = 4 << 10  # reading a gap of this size is cheaper than a second read
_WINDOW_BYTES = 1 << 20


class FileReader:
    """Random access to one file of a checkpoint, by ``pread``: a file that shrinks under it is an error, no crash."""

    def __init__(self, folder: Path, record: SavedFile) -> None:
        self._descriptor: int | None = None
        self._closer: weakref.finalize[..., FileReader] | None = None
        self.path = folder / record.name
        self.record = record
        self._verified: set[int] = set()

    def open(self) -> int:
        """Returns the descriptor; opened at the first call.

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
                raise CheckpointError(
                    f"{self.path}: cannot be opened ({error.strerror}); check its permissions, or load another tag"
                ) from error
            # Lazily read tensors have no other place to close the file. Not __del__: where the interpreter ends, the
            # module os may be gone before the object.
            self._closer = weakref.finalize(self, os.close, self._descriptor)
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(
                    f"{self.path} is not a plain file; the checkpoint was altered. Copy it again from where it was "
                    "written"
                )
            size = status.st_size
            if size != self.record.size:
                raise CheckpointError(
                    f"{self.path} has {size} bytes, but {self.record.size} were written; it was cut off or altered. "
                    "Use another tag, or copy the file again from where it was written"
                )
        return self._descriptor

    def close(self) -> None:
        """Closes the file."""
        if self._closer is not None:
            self._closer()
        self._descriptor = self._closer = None

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fills ``out`` from byte ``offset`` on. Raises CheckpointError: the file is too short or cannot be read."""
        descriptor = self.open()
        while out:
            try:
                count = _read_at(descriptor, out, offset)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: cannot be read ({error.strerror}); "
                    "check the disk and the permissions, or load another tag"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ended at byte {offset} while it was being read; "
                    "it was cut off or has changed. Copy it again, or load another tag"
                )
            out, offset = out[count:], offset + count

    def chunks_of(self, start: int, stop: int) -> range:
        """Returns the chunks that bytes ``[start, stop)`` touch."""
        return range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES))

    def verify(self, chunk: int) -> None:
        """Compares the checksum of one chunk. Raises CheckpointError: the checksum differs."""
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
        """Returns the whole file, verified."""
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


class FileRun(NamedTuple):
    """Elements ``[start, stop)`` of a wanted tile that are contiguous in a file."""

    start: int  # the first, in the flattened tile
    stop: int  # one past the last
    saved: SavedRun  # the run of the file in which they are
    reader: FileReader
    offset: int  # first byte there

    @property
    def end(self) -> int:
        """Offset after the last byte."""
        return self.offset + (self.stop - self.start) * self.saved.dtype.itemsize


class CheckpointReader(CheckpointSource):
    """The tensors of one tag folder.

    Args:
        verify: Whether :meth:`check` compares checksums.
        manifest: The manifest; None: read it from the folder.
        files: Readers of its files that are not in the folder; None: all of them are.

    Raises:
        CheckpointError: Another checkpoint engine stored the tensors.
    """

    def __init__(
        self,
        folder: Path,
        *,
        verify: bool = True,
        manifest: Manifest | None = None,
        files: Sequence[FileReader] | None = None,
    ) -> None:
        self.folder = folder
        self.label = str(folder)
        self.manifest = Manifest.read(folder) if manifest is None else manifest  # what the folder should hold
        self._verify = verify
        if files is None and STORED_BY in self.manifest.facts:
            name = self.manifest.facts[STORED_BY]
            raise CheckpointError(
                f"{folder}: its tensors were stored by the checkpoint engine {name!r}, expected files; load it by "
                f"engine.load_checkpoint, with engine.checkpoint_engine = {name}(...) before"
            )
        readers = [FileReader(folder, record) for record in self.manifest.files] if files is None else files
        self._files = {reader.record.name: reader for reader in readers}
        self._runs = self._index_runs()
        self._kinds: dict[int, list[str]] = defaultdict(list)
        for kind, bucket in self._runs:
            self._kinds[bucket].append(kind)
        self._sources: dict[str, list[SavedTile]] = {}
        self._buffers = {
            tensor.name: (self._files[record.name], tensor)
            for record in self.manifest.files
            if record.kind == BUFFERS
            for tensor in record.tensors
        }
        self.aliases = self.manifest.aliases
        self.left_out = self.manifest.left_out
        self.parameters = {name: self._parameter(name) for name in self.manifest.tiles if name not in self.left_out}
        self.buffers = {
            name: SavedBuffer(name, tensor.shape, tensor.dtype) for name, (_, tensor) in self._buffers.items()
        }

    def close(self) -> None:
        """Closes all files."""
        for reader in self._files.values():
            reader.close()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _index_runs(self) -> dict[tuple[str, int], list[tuple[SavedRun, FileReader]]]:
        found: dict[tuple[str, int], list[tuple[SavedRun, FileReader]]] = defaultdict(list)
        for record in self.manifest.files:
            for run in record.runs:
                found[(record.kind, run.bucket)].append((run, self._files[record.name]))
        for (kind, bucket), runs in found.items():
            runs.sort(key=lambda entry: entry[0].start)
            for (first, _), (second, reader) in zip(runs, runs[1:], strict=False):
                if second.start < first.stop:
                    raise CheckpointError(
                        f"{reader.path}: {kind} of bucket {bucket} occurs twice; the file is damaged. Use another tag, "
                        "or copy it again"
                    )
        return found

    def _parameter(self, name: str) -> SavedParameter:
        saved = self.manifest.tiles[name]
        filled = [entry for entry in saved if entry.tile.numel]
        kinds = {}
        for kind in self._kinds[filled[0].bucket] if filled else ():
            if all(self._covers(kind, entry.bucket, entry.start, entry.stop) for entry in filled):
                kinds[kind] = self._runs[(kind, filled[0].bucket)][0][0].dtype
        dtype = getattr(torch, self.manifest.buckets[saved[0].bucket].dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self.folder}: parameter {name!r} has no known dtype; the checkpoint was altered")
        whole = saved[0].tile.whole()
        if whole.numel == 0:
            kinds.setdefault(COMPUTE, dtype)
        if not self._is_complete(name, whole) or (MASTER not in kinds and COMPUTE not in kinds):
            raise CheckpointError(
                f"{self.folder}: the values of parameter {name!r} are not complete; the checkpoint is damaged. Use "
                "another tag, or copy it again from where it was written"
            )
        tiles = tuple(entry.tile for entry in saved)
        return SavedParameter(name, whole.shape, kinds, name in self.manifest.frozen, dtype, tiles)

    def _is_complete(self, name: str, whole: Tile) -> bool:
        """Returns whether the saved tiles of a parameter cover it. Regions saved by several ranks count once."""
        if self.manifest.tiles[name][0].tile.part is None:
            return True
        return sum(region.numel for entry in self._sources_of(name) for region in entry.tile.regions) == whole.numel

    def _sources_of(self, name: str) -> list[SavedTile]:
        """Returns the tiles of a parameter, without regions that an earlier tile has (heads on several ranks)."""
        if name not in self._sources:
            seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
            found = []
            for entry in self.manifest.tiles[name]:
                new = tuple(region for region in entry.tile.regions if (region.whole, region.shape) not in seen)
                seen.update((region.whole, region.shape) for region in new)
                if entry.tile.part is not None and len(new) < len(entry.tile.regions):
                    part = replace(entry.tile.part, regions=new)
                    entry = entry._replace(tile=replace(entry.tile, part=part))
                found.append(entry)
            self._sources[name] = found
        return self._sources[name]

    def _covers(self, kind: str, bucket: int, start: int, stop: int) -> bool:
        position = start
        for run, _ in self._overlapping(kind, bucket, start, stop):
            if run.start > position:
                return False
            position = run.stop
        return position >= stop

    def _overlapping(self, kind: str, bucket: int, start: int, stop: int) -> Iterator[tuple[SavedRun, FileReader]]:
        runs = self._runs.get((kind, bucket), [])
        first = bisect.bisect_right(runs, start, key=lambda entry: entry[0].stop)
        for run, reader in runs[first:]:
            if run.start >= stop:
                return
            yield run, reader

    def _common_runs(self, wanted: Wanted) -> Iterator[tuple[SavedTile, CommonRun]]:
        """Yields which part of ``wanted`` lies in which saved tile, and where."""
        if wanted.start >= wanted.stop:
            return
        same = self._same(wanted)
        if same is not None:  # copied unchanged, with its padding
            yield same, CommonRun(wanted.start, wanted.start, wanted.stop - wanted.start)
            return
        tile = self.manifest.tiles[wanted.name][0].tile.whole() if wanted.tile is None else wanted.tile
        for entry in self._sources_of(wanted.name):
            for common in common_runs(tile, wanted.start, wanted.stop, entry.tile):
                yield entry, common

    def _same(self, wanted: Wanted) -> SavedTile | None:
        """Returns the saved tile that is cut as the one of ``wanted``, or None."""
        saved = self.manifest.tiles[wanted.name]
        if wanted.tile is None and saved[0].tile.part is None:
            return saved[0]
        tile = saved[0].tile.whole() if wanted.tile is None else wanted.tile
        return next((entry for entry in saved if entry.tile.holds_same(tile)), None)

    def runs_of(self, wanted: Wanted, *, all_of_it: bool = False) -> Iterator[FileRun]:
        """Yields each part of the elements ``wanted`` that exists.

        Raises:
            CheckpointError: With ``all_of_it``, a part does not exist.
        """
        for entry, common in self._common_runs(wanted):
            low = entry.start + common.other_start
            position, high = low, low + common.numel
            for run, reader in self._overlapping(wanted.kind, entry.bucket, low, high):
                first, last = max(run.start, low), min(run.stop, high)
                if all_of_it and first > position:
                    break
                start = common.start + first - low
                offset = run.offset + (first - run.start) * run.dtype.itemsize
                yield FileRun(start, start + last - first, run, reader, offset)
                position = last
            if all_of_it and position < high:
                raise CheckpointError(f"{self.folder}: {wanted.kind} of {wanted.name!r} is not complete")

    # -- the source ----------------------------------------------------------------------------------------------------

    def check(self, wanted: Sequence[Wanted]) -> None:
        """Makes sure that ``wanted`` and all buffers can be read and are undamaged, as far as the format can detect."""
        chunks: dict[FileReader, set[int]] = defaultdict(set)
        for entry in wanted:
            for run in self.runs_of(entry):
                chunks[run.reader].update(run.reader.chunks_of(run.offset, run.end))
        for reader, tensor in self._buffers.values():
            chunks[reader].update(reader.chunks_of(tensor.offset, tensor.offset + tensor.nbytes))
        self._name_missing_folders(chunks)
        for reader in chunks:
            reader.open()
        if self._verify:
            work = [(reader, chunk) for reader, numbers in chunks.items() for chunk in sorted(numbers)]
            with ThreadPoolExecutor(_THREADS, "checkpoint-verify") as pool:
                for _ in pool.map(lambda item: item[0].verify(item[1]), work):
                    pass

    def _name_missing_folders(self, needed: Iterable[FileReader]) -> None:
        """Names the ranks whose files are missing, where each rank saved into a folder of its own."""
        leaders = self.manifest.facts.get(FOLDERS)
        if not isinstance(leaders, list):
            return
        missing = sorted(reader.path.name for reader in needed if not reader.path.exists())
        if not missing:
            return
        ranks = sorted({int(found[1]) for name in missing if (found := _FILE_OF_RANK.match(name))})
        raise CheckpointError(
            f"{self.folder}: expected the files of all ranks that are needed here, found none of "
            f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} ({missing[0]}{' ...' * (len(missing) > 1)}): "
            f"ranks saved into {len(set(map(str, leaders)))} folders. Copy the content of all of them into one folder "
            "and load that, or give each of as many ranks the folder that it saved into"
        )

    def covered(self, wanted: Wanted) -> list[tuple[int, int]]:
        """Returns the parts of ``wanted`` that the checkpoint has, as intervals of the same flattened tile."""
        return [(run.start, run.stop) for run in self.runs_of(wanted)]

    def read(self, wanted: Wanted, out: torch.Tensor) -> None:
        """Copies ``wanted`` into ``out``: 1-D, of that length, any dtype and device."""
        if out.device.type != "cpu" and self._same(wanted) is None:  # one transfer instead of one for every run
            host = torch.empty(out.numel(), dtype=out.dtype)
            self.read(wanted, host)
            out.copy_(host)
            return
        if wanted.tile is not None and wanted.tile.is_padded:
            out.zero_()
        for window in windows(self.runs_of(wanted, all_of_it=True)):
            first = window[0]
            if len(window) == 1:
                place = out[first.start - wanted.start : first.stop - wanted.start]
                _copy(first.reader, first.offset, first.saved.dtype, place)
                continue
            data = torch.empty(window[-1].end - first.offset, dtype=torch.uint8)
            first.reader.read_into(first.offset, bytes_of(data))
            values = data.view(first.saved.dtype)
            for run in window:
                start = (run.offset - first.offset) // values.element_size()
                place = out[run.start - wanted.start : run.stop - wanted.start]
                place.copy_(values[start : start + place.numel()])

    def read_buffer(self, name: str) -> torch.Tensor:
        """Returns the buffer ``name``."""
        reader, tensor = self._buffers[name]
        return self._read_named(reader, tensor)

    def named_tensors(self, file: str) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes of the whole tensors in a file; none where the checkpoint has no such file."""
        record = self.manifest.file(file)
        return {} if record is None else {tensor.name: tensor.shape for tensor in record.tensors}

    def read_named(self, file: str, name: str) -> torch.Tensor:
        """Returns one of :meth:`named_tensors`, verified, in host memory."""
        record = self.manifest.file(file)
        assert record is not None
        tensor = next(tensor for tensor in record.tensors if tensor.name == name)
        return self._read_named(self._files[file], tensor)

    @staticmethod
    def _read_named(reader: FileReader, tensor: NamedTensor) -> torch.Tensor:
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        if out.numel():
            reader.read_into(tensor.offset, bytes_of(out))
        return out

    def open_file(self, name: str) -> None:
        """Opens the file ``name``. Raises CheckpointError: the file is missing or has another size."""
        self._files[name].open()

    def read_file(self, name: str) -> bytes | None:
        """Returns the whole of the small file ``name``, verified; None if the checkpoint has none of that name."""
        reader = self._files.get(name)
        if reader is None:
            return None
        self._name_missing_folders([reader])
        return reader.whole()


def windows(runs: Iterable[FileRun]) -> Iterator[list[FileRun]]:
    """Groups runs that are read at once: they lie close together in one run of the file."""
    window: list[FileRun] = []
    for run in runs:
        if window:
            last = window[-1]
            is_near = run.saved is last.saved and 0 <= run.offset - last.end <= _GAP_BYTES
            if not is_near or run.end - window[0].offset > _WINDOW_BYTES:
                yield window
                window = []
        window.append(run)
    if window:
        yield window


def _copy(reader: FileReader, offset: int, dtype: torch.dtype, out: torch.Tensor) -> None:
    """Copies bytes of a file into ``out``: directly if it is in host memory in the same dtype, else by a buffer."""
    if out.device.type == "cpu" and out.dtype == dtype and out.is_contiguous():
        reader.read_into(offset, bytes_of(out))
        return
    staging = torch.empty(min(_STAGING_NUMEL, out.numel()), dtype=dtype)
    for start in range(0, out.numel(), _STAGING_NUMEL):
        part = staging[: min(_STAGING_NUMEL, out.numel() - start)]
        reader.read_into(offset + start * dtype.itemsize, bytes_of(part))
        out[start : start + part.numel()].copy_(part)
