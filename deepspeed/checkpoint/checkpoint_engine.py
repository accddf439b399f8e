"""Checkpoint engines store and load state dicts by path: torch's files, or a program's own class.

A program gives its own to ``engine.checkpoint_engine``; ``save_checkpoint`` and ``load_checkpoint`` then pass every
large tensor through it. ``PipelineModule.save_state_dict`` and ``load_state_dir`` take one as an argument.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from deepspeed.checkpoint import disk
from deepspeed.checkpoint.format import SavedFile
from deepspeed.checkpoint.reader import FileReader
from deepspeed.checkpoint.restricted import dumps, loads
from deepspeed.checkpoint.writer import ChunkedStream, FileTensor, FileWriter
from deepspeed.errors import CheckpointError
from deepspeed.nested import map_tensors
from deepspeed.zero.storage import dense

FilePath = str | PathLike[str]

_HEAD = 64  # bytes before the first tensor, since no tensor of a manifest begins at the first byte


@dataclass(frozen=True)
class CheckpointCommitInfo:
    """Names the checkpoint that ``save_checkpoint`` begins or ends; its text is the tag."""

    tag: str  # name of the checkpoint
    save_dir: str  # folder of checkpoints
    save_latest: bool  # whether ``latest`` will name this one

    def __str__(self) -> str:
        return self.tag


class CheckpointEngine:
    """Base class of objects that store state dicts by path. Rank-local: no method is a collective."""

    def __init__(self, config_params: Any = None) -> None:
        self.config_params = config_params

    def create(self, info: Any) -> None:
        """Called before files are saved. ``info``: ``save_checkpoint`` passes a :class:`CheckpointCommitInfo`."""

    def save(self, state_dict: Any, path: FilePath) -> None:
        """Stores ``state_dict`` under ``path``. ``save_checkpoint`` may call it in a thread (``async_save``).

        Args:
            state_dict: Tensors by name; those of ``save_checkpoint`` are in host memory.
            path: The path of the file: ``<folder>/<tag>/<name>.pt``.

        Raises:
            NotImplementedError: In the base class.
        """
        raise NotImplementedError(f"{type(self).__name__}.save: derive it from CheckpointEngine with a save(...)")

    def load(self, path: FilePath, map_location: Any = None) -> Any:
        """Returns what :meth:`save` stored under ``path``.

        Args:
            map_location: Device of the tensors, as in ``torch.load``; None: the host.

        Raises:
            NotImplementedError: In the base class.
        """
        raise NotImplementedError(f"{type(self).__name__}.load: derive it from CheckpointEngine with a load(...)")

    def commit(self, info: Any) -> bool:
        """Returns whether all files since :meth:`create` are stored; called after the last one.

        An engine whose :meth:`save` returns early waits here. On False, ``save_checkpoint`` raises on every rank.
        """
        return True

    def makedirs(self, path: FilePath, exist_ok: bool = False) -> None:
        """Makes a folder and those above it. Raises FileExistsError: it exists, and ``exist_ok`` is false."""
        os.makedirs(path, exist_ok=exist_ok)

    def is_decoupled(self) -> bool:
        """Returns whether :meth:`save` returns before the file is stored."""
        return False

    def cleanup(self) -> None:
        """Frees what the engine holds; called when it is not used any more."""


class TorchCheckpointEngine(CheckpointEngine):
    """Files of ``torch.save``, each replaced in one step, and read without running code."""

    @override
    def save(self, state_dict: Any, path: FilePath) -> None:
        disk.replace_file(Path(path), dumps(state_dict))

    @override
    def load(self, path: FilePath, map_location: Any = None) -> Any:
        """Returns what was saved there. Raises CheckpointError: it is damaged, or holds objects that need code."""
        found = loads(Path(path).read_bytes(), str(path))
        return found if map_location is None else map_tensors(found, lambda tensor: tensor.to(map_location))


class StateDictWriter(FileWriter):
    """Writes one rank's tensors through a checkpoint engine, and small files itself. ``note`` gets bytes written."""

    def __init__(self, folder: Path, engine: CheckpointEngine, note: Callable[[int], None] | None = None) -> None:
        super().__init__(folder, note)
        self._engine = engine

    @override
    def _write(self, name: str, entries: Sequence[FileTensor]) -> tuple[list[int], int, tuple[int, ...]]:
        state = {entry.name: _joined(entry) for entry in entries}
        # Checksums and offsets are those of a virtual file: a head of zeros, then the tensors end to end.
        with open(os.devnull, "wb") as sink:
            stream = ChunkedStream(sink.fileno(), self._pool, self._note)
            stream.write(memoryview(bytes(_HEAD)))
            offsets = []
            for tensor in state.values():
                offsets.append(stream.size)
                stream.write(disk.bytes_of(tensor.view(-1)), tensor)
            checksums = stream.finish()
        self._engine.save(state, path_for_engine(self.folder / name))
        return offsets, stream.size, checksums


def _joined(entry: FileTensor) -> torch.Tensor:
    """Returns a tensor that is written in parts as one, in host memory and with a storage of its own."""
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    flat, position = whole.view(-1), 0
    for part in entry.values:
        flat[position : position + part.numel()].copy_(part.detach().view(-1))
        position += part.numel()
    if position != flat.numel():
        raise CheckpointError(f"{entry.name} has {position} elements, other than its shape {entry.shape}")
    return whole


class StateDictFile(FileReader):
    """Reads the bytes of a file of :class:`StateDictWriter`; its engine loads the whole state dict on opening."""

    def __init__(self, folder: Path, record: SavedFile, engine: CheckpointEngine) -> None:
        super().__init__(folder, record)
        self._engine = engine
        self._ends: list[int] = []
        self._parts: list[torch.Tensor] = []

    @override
    def open(self) -> int:
        if not self._parts:
            path = path_for_engine(self.path)
            call = f"{type(self._engine).__name__}.load({path!r})"
            state = self._engine.load(path, map_location="cpu")
            if not isinstance(state, dict):
                raise CheckpointError(f"{call} returned a {type(state).__name__}, expected the dict that was saved")
            wanted = [(f"{run.bucket}:{run.start}", run.dtype, run.nbytes, run.offset) for run in self.record.runs]
            wanted += [(entry.name, entry.dtype, entry.nbytes, entry.offset) for entry in self.record.tensors]
            parts, ends = [torch.zeros(_HEAD, dtype=torch.uint8)], [_HEAD]
            for name, dtype, nbytes, offset in wanted:
                found = state.get(name)
                is_right = isinstance(found, torch.Tensor) and found.dtype == dtype and found.nbytes == nbytes
                if not is_right or offset != ends[-1]:
                    raise CheckpointError(
                        f"{call}: expected {name!r} with {nbytes} bytes of {dtype}, as it was saved, found "
                        f"{_shown(found)}; the file was altered, or the engine returned another one"
                    )
                parts.append(dense(torch.as_tensor(found).detach().cpu()).view(-1))
                ends.append(offset + nbytes)
            self._parts, self._ends = parts, ends
        return -1

    @override
    def close(self) -> None:
        self._parts, self._ends = [], []

    @override
    def read_into(self, offset: int, out: memoryview) -> None:
        self.open()
        while out:
            number = bisect_right(self._ends, offset)
            if number == len(self._parts):
                raise CheckpointError(
                    f"{self.path} ended at byte {offset} while it was being read; "
                    "it was cut off or has changed. Copy it again, or load another tag"
                )
            data = disk.bytes_of(self._parts[number])
            within = offset - (self._ends[number] - len(data))
            part = data[within : within + len(out)]
            out[: len(part)] = part
            out, offset = out[len(part) :], offset + len(part)


def path_for_engine(path: Path) -> str:
    """Returns the path of a file as a checkpoint engine sees it; torch.load takes ``.safetensors`` for that format."""
    return str(path.with_suffix(".pt"))


def _shown(found: Any) -> str:
    if isinstance(found, torch.Tensor):
        return f"{found.nbytes} bytes of {found.dtype}"
    return "nothing" if found is None else f"a {type(found).__name__}"
