"""Reads tensors of weight files, whole or in part, without reading the rest of the file.

A file holds whole tensors (Transformers' files, those of ``save_16bit_model`` and ``zero_to_fp32.py``), or the parts of
one tensor-parallel rank, as :mod:`deepspeed.inference.tensor` writes them. The header of such a file lists which part
of each tensor it holds, so that any number of ranks can read them.
"""

from __future__ import annotations

import functools
import json
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deepspeed.checkpoint.consolidate import open_source
from deepspeed.checkpoint.directory import LATEST, format_of
from deepspeed.checkpoint.format import COMPUTE, MASTER
from deepspeed.checkpoint.source import CheckpointSource, Wanted
from deepspeed.errors import CheckpointError
from deepspeed.zero.tiling.tiles import Tile, TilePart, TileRegion, in_common

PARTS = "deepspeed_parts"
"""Key of a file's header that lists the parts."""
DESCRIPTION = "ds_inference_config.json"
#: What reading a damaged file raises, in safetensors and in torch.
_DAMAGE = (
    *(SafetensorError, OSError, RuntimeError, EOFError, UnpicklingError, ValueError, LookupError, struct.error),
    AssertionError,
)
_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.pt")


@dataclass(frozen=True)
class Stored:
    """A tensor in an open file."""

    tile: Tile  # its name, its shape, and which part of the named tensor it is
    is_part: bool  # whether other files hold the other parts of the named tensor
    # takes one slice per dimension and returns these elements; ``()`` returns all
    read: Callable[[tuple[slice, ...]], torch.Tensor]

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole named tensor."""
        return not self.is_part

    def offset_in_named(self) -> int:
        """Returns where this part begins in the flattened named tensor, in elements; CheckpointError for gaps."""
        (region,) = self.tile.regions
        shape = self.tile.global_shape
        first = self._cut_dim
        if region.shape[first + 1 :] != shape[first + 1 :]:
            raise CheckpointError(
                f"init_inference: {self.tile.name!r} is stored in parts that are not contiguous in it; export whole "
                "weights (save_16bit_model, or save_pretrained in one process)"
            )
        offset = 0
        for index, extent in zip(region.whole, shape, strict=True):
            offset = offset * extent + index
        return offset

    def read_run(self, low: int, high: int) -> torch.Tensor:
        """Returns elements ``low`` to ``high`` of the flattened tensor; reads only the rows that hold them."""
        shape, dim = self.tile.shape, self._cut_dim
        if not shape:
            return self.read(()).reshape(1)
        width = prod(shape[dim + 1 :])
        rows = slice(low // width, -(-high // width))
        where = (*[slice(0, 1)] * dim, rows, *[slice(0, extent) for extent in shape[dim + 1 :]])
        return self.read(where).reshape(-1)[low - rows.start * width : high - rows.start * width]

    @property
    def _cut_dim(self) -> int:
        """The first dimension with more than one element."""
        return next((dim for dim, extent in enumerate(self.tile.shape) if extent > 1), max(len(self.tile.shape) - 1, 0))

    def copy_into(self, values: torch.Tensor, regions: tuple[TileRegion, ...]) -> None:
        """Reads into ``values`` what this part has of it; its shape is that of a tile with these ``regions``."""
        for mine in regions:
            for theirs in self.tile.regions:
                if (common := in_common(mine, theirs)) is not None:
                    values[common[0]] = self.read(common[1]).to(values.dtype)


@dataclass(frozen=True)
class WeightFiles:
    """Lists the weight files of a checkpoint."""

    whole: tuple[Path, ...]  # files of whole tensors
    parts: tuple[Path, ...] = ()  # files of parts, one per rank that wrote
    training: Path | None = None  # a folder of ``save_checkpoint``, instead of both

    def __str__(self) -> str:
        if self.training is not None:
            return f"checkpoint {self.training}"
        files = (*self.whole, *self.parts)
        return f"{len(files)} files ({files[0]} ...)" if len(files) > 1 else str(files[0])

    def tensors(self) -> Iterator[Stored]:
        """Yields every tensor, valid until the next one, file by file; CheckpointError where a file is damaged."""
        if self.training is not None:
            yield from _training_tensors(open_source(self.training))
        for path in (*self.whole, *self.parts):
            with _checkpoint_errors(path):
                yield from _safetensors(path, path in self.parts) if path.suffix == ".safetensors" else _pickled(path)


def find_files(checkpoint: str | Mapping[str, Any], base: Path) -> WeightFiles:
    """Returns the weight files that ``init_inference(checkpoint=...)`` names.

    Args:
        checkpoint: A folder (of weights, or of ``save_checkpoint``), a file of weights, a JSON file, or the object of
            such a file.

    Raises:
        CheckpointError: There are no such files, or the description of them cannot be read.
    """
    if not isinstance(checkpoint, str):
        return _read_description(checkpoint, base)
    path = base / checkpoint
    if path.is_dir():
        if (path / DESCRIPTION).is_file():
            path = path / DESCRIPTION
        elif (path / LATEST).is_file() or format_of(path) is not None:
            return WeightFiles((), training=path)
        else:
            for pattern in _PATTERNS:
                if found := sorted(path.glob(pattern)):
                    return WeightFiles(tuple(found))
            raise CheckpointError(
                f"init_inference: the folder {path} has no {' or '.join(_PATTERNS)}; give the folder of the weights"
            )
    if not path.is_file():
        raise CheckpointError(f"init_inference: checkpoint {path}: there is no such file or folder; correct the path")
    if path.suffix != ".json":
        return WeightFiles((path,))
    try:
        return _read_description(json.loads(path.read_text()), path.parent)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"init_inference: checkpoint {path} is not valid JSON: {error}; correct the file"
        ) from error


def _read_description(description: Any, base: Path) -> WeightFiles:
    listed = description.get("checkpoints") if isinstance(description, Mapping) else None
    if isinstance(listed, str):
        return find_files(listed, Path(description.get("base_dir") or base))
    size = (description.get("tp_size") or description.get("mp_size") or 1) if listed else 1
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(
            f"init_inference: checkpoint: tp_size: expected the number of files under 'tp', found {size!r}; correct it"
        )
    if isinstance(listed, Mapping):
        parts = listed.get("tp") or []
        if len(parts) not in (0, size):
            raise CheckpointError(
                f"init_inference: checkpoint: tp_size is {size}, but {len(parts)} files are listed under 'tp'; "
                "list one file for each rank"
            )
        names = list(listed.get("non_tp") or []), list(parts)
    elif isinstance(listed, list) and size == 1:
        names = list(listed), []
    else:
        raise CheckpointError(
            "init_inference: checkpoint: expected an object whose 'checkpoints' lists files of whole tensors, or has "
            "the lists 'non_tp' and 'tp' as save_mp_checkpoint_path writes them; turn training files of several ranks "
            "into whole tensors with deepspeed.checkpoint"
        )
    if wrong := [name for name in (*names[0], *names[1]) if not isinstance(name, str)]:
        raise CheckpointError(
            f"init_inference: checkpoint: expected names of files, found {wrong[0]!r}; correct the list"
        )
    base = Path(description.get("base_dir") or base)
    found = WeightFiles(tuple(base / name for name in names[0]), tuple(base / name for name in names[1]))
    for path in (*found.whole, *found.parts):
        if not path.is_file():
            raise CheckpointError(f"init_inference: checkpoint: there is no file {path}; correct the path")
    if not found.whole and not found.parts:
        raise CheckpointError(
            "init_inference: checkpoint: 'checkpoints' lists no files; list the files that hold the weights"
        )
    return found


@contextmanager
def _checkpoint_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"init_inference: {path} cannot be read ({error}); it is damaged or not a file of weights. Write "
            "it again, or name another one"
        ) from error


def _safetensors(path: Path, is_part: bool) -> Iterator[Stored]:
    with safe_open(path, framework="pt") as opened:
        described = json.loads((opened.metadata() or {}).get(PARTS, "null"))
        if is_part and described is None:
            raise CheckpointError(
                f"init_inference: {path}: expected {PARTS!r} in the header of a file listed under 'tp', found none; "
                "write the files with save_mp_checkpoint_path"
            )
        for name in opened.keys():  # noqa: SIM118 - no mapping
            shape = tuple(opened.get_slice(name).get_shape())
            part = None
            if described is not None:
                regions = tuple(
                    TileRegion(*(tuple(numbers) for numbers in region)) for region in described[name]["boxes"]
                )
                part = TilePart(name, tuple(described[name]["shape"]), regions)

            def read(where: tuple[slice, ...], name: str = name) -> torch.Tensor:
                return opened.get_slice(name)[where] if where else opened.get_tensor(name)  # type: ignore[no-any-return]

            yield Stored(Tile(name, shape, part=part), is_part, read)


def _pickled(path: Path) -> Iterator[Stored]:
    is_mapped = zipfile.is_zipfile(path)  # files of old versions of torch are not, and cannot be mapped
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"init_inference: {path} holds a {type(found).__name__}; expected a state dict, "
            "tensors by name. Give files that hold one"
        )
    found = found.get("module", found)
    for name, values in found.items():
        if isinstance(values, torch.Tensor):
            yield Stored(Tile(name, tuple(values.shape)), False, values.__getitem__)


def _training_tensors(source: CheckpointSource) -> Iterator[Stored]:
    """Yields the tensors of a training checkpoint, under the names in the model that it was saved from."""
    for name, parameter in source.parameters.items():
        kind = MASTER if MASTER in parameter.kinds else COMPUTE
        read = functools.partial(_read_rows, source, kind, name, parameter.shape, parameter.kinds[kind])
        for alias in _all_names(source, name):
            yield Stored(Tile(alias, parameter.shape), False, read)
    for name, buffer in source.buffers.items():
        values = source.read_buffer(name)
        for alias in _all_names(source, name):
            yield Stored(Tile(alias, buffer.shape), False, values.__getitem__)


def _all_names(source: CheckpointSource, name: str) -> list[str]:
    return [name, *(alias for alias, original in source.aliases.items() if original == name)]


def _read_rows(
    source: CheckpointSource, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: tuple[slice, ...]
) -> torch.Tensor:
    """Reads and verifies the rows that ``where`` touches (all for ``()``), and returns the elements in ``where``."""
    width = prod(shape[1:])
    first, last = (where[0].start or 0, where[0].stop) if where else (0, shape[0] if shape else 1)
    rows = range(*slice(first, last).indices(shape[0] if shape else 1))
    wanted = Wanted(kind, name, rows.start * width, rows.stop * width)
    source.check([wanted])
    values = torch.empty((rows.stop - rows.start) * width, dtype=dtype)
    source.read(wanted, values)
    values = values.view(-1, *shape[1:]) if shape else values.view(())
    return values[(slice(None), *where[1:])] if where else values.view(shape)
