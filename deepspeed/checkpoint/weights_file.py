"""Files of full tensors that other programs read: torch or safetensors, in one file or in shards with an index.

Tensors are written one after the other, in the planned order. So a safetensors file needs no more memory than a part of
a tensor, and a torch file no more than its size.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from deepspeed.checkpoint import disk
from deepspeed.checkpoint.directory import SAVING
from deepspeed.checkpoint.format import safetensors_header

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B|B)?\s*", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_size(size: int | str) -> int:
    """Returns the bytes of ``5GB`` (powers of 1000) or ``5GiB`` (1024). Raises ValueError: the text is no size."""
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size)
    if found is None:
        raise ValueError(f"max_shard_size: expected bytes or a text such as '5GB', found {size!r}")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that will be written."""

    name: str  # its key
    dtype: torch.dtype  # in the file
    shape: tuple[int, ...]  # full shape
    same_as: str | None = None  # the key of the tensor that it is tied to, if that is written too

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.dtype.itemsize


def plan_shards(entries: Sequence[TensorEntry], limit: int | None) -> list[list[TensorEntry]]:
    """Cuts ``entries``, in order, so that no shard is larger than ``limit`` bytes unless one tensor is."""
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if limit is not None and shards[-1] and size + entry.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def shard_names(filename: str, count: int) -> list[str]:
    """Returns ``model.safetensors``, or ``model-00001-of-0000N.safetensors`` and so on."""
    stem, extension = os.path.splitext(filename)
    if count == 1:
        return [filename]
    return [f"{stem}-{number:05d}-of-{count:05d}{extension}" for number in range(1, count + 1)]


class WeightsWriter:
    """Writes full tensors into ``folder/filename``, or into shards of it with an index.

    Nothing has its name before all is written.

    Args:
        folder: Made if it is not there.
        filename: Ends in ``.safetensors`` for that format; everything else is a torch file.
        entries: What will come, in order; a tied entry after the one that it is the same as.
        limit: Largest shard in bytes; None for one file.
    """

    def __init__(self, folder: Path, filename: str, entries: Sequence[TensorEntry], limit: int | None) -> None:
        self._folder = folder
        self._filename = filename
        self._is_safetensors = filename.endswith(".safetensors")
        self._shards = plan_shards(entries, limit)
        self._names = shard_names(filename, len(self._shards))
        self._index_name = f"{filename}.index.json"
        self._current = -1
        self._left: list[TensorEntry] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._descriptor: int | None = None
        disk.make_folder(folder)
        try:
            self._open_next()
        except BaseException:
            self.abandon()
            raise

    def add(self, entry: TensorEntry, parts: Iterable[torch.Tensor]) -> None:
        """Writes the next entry.

        Args:
            parts: Consecutive 1-D chunks of the flattened tensor, in host memory, in the entry's dtype. Not read for a
                tied entry whose values this file has already, where the format can share them.
        """
        assert self._left[0] == entry, f"expected {self._left[0].name}, got {entry.name}"
        if self._is_safetensors:
            assert self._descriptor is not None
            for part in parts:
                disk.write_all(self._descriptor, disk.bytes_of(part))
        elif entry.same_as is not None and entry.same_as in self._tensors:
            self._tensors[entry.name] = self._tensors[entry.same_as]
        else:
            self._tensors[entry.name] = _whole(entry, parts)
        self._left.pop(0)
        while not self._left and self._current + 1 < len(self._shards):
            self._close()
            self._open_next()

    def finish(self) -> list[str]:
        """Completes the last file, writes the index and returns the names of the files, the index last."""
        assert not self._left, f"{self._left[0].name} was not written"
        self._close()
        written = list(self._names)
        if len(self._shards) > 1:
            written.append(self._index_name)
            with disk.new_file(self._hidden(written[-1])) as descriptor:
                disk.write_all(descriptor, memoryview(self._index()))
        self._remove_former(written)
        for name in written:
            os.replace(self._hidden(name), self._folder / name)
        disk.sync_folder(self._folder)
        return written

    def abandon(self) -> None:
        """Removes what was written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        for name in (*self._names, self._index_name):
            with contextlib.suppress(OSError):
                os.unlink(self._hidden(name))

    def _hidden(self, name: str) -> Path:
        return self._folder / (SAVING + name)

    def _open_next(self) -> None:
        self._current += 1
        self._left = list(self._shards[self._current])
        path = self._hidden(self._names[self._current])
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        if self._is_safetensors:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            header = safetensors_header([(e.name, e.dtype, e.shape) for e in self._left], {"format": "pt"})
            disk.write_all(self._descriptor, memoryview(header))

    def _close(self) -> None:
        if self._is_safetensors:
            assert self._descriptor is not None
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None
            return
        path = self._hidden(self._names[self._current])
        try:
            torch.save(self._tensors, path)
        except RuntimeError as error:  # so torch reports a full disk
            reason = str(error).partition("\n")[0]
            raise OSError(f"{path}: torch cannot write it ({reason}); make room, or write to another disk") from error
        self._tensors = {}
        disk.sync_folder(path)  # a file is synced the same way

    def _index(self) -> bytes:
        weight_map = {e.name: name for name, shard in zip(self._names, self._shards, strict=True) for e in shard}
        total = sum(entry.nbytes for shard in self._shards for entry in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()

    def _remove_former(self, written: list[str]) -> None:
        """Files of an earlier export under this name, which readers would prefer to the new ones or mix with them."""
        stem, extension = (re.escape(part) for part in os.path.splitext(self._filename))
        former = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?{extension}(\.index\.json)?")
        for name in os.listdir(self._folder):
            if former.fullmatch(name) and name not in written:
                os.unlink(self._folder / name)


def _whole(entry: TensorEntry, parts: Iterable[torch.Tensor]) -> torch.Tensor:
    out = torch.empty(prod(entry.shape), dtype=entry.dtype)
    position = 0
    for part in parts:
        out[position : position + part.numel()].copy_(part)
        position += part.numel()
    return out.view(entry.shape)
