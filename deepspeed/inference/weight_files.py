"""Tensors in files of weights, of which any part can be read without the rest.

A file holds whole tensors (Transformers' files, those of ``save_16bit_model`` and ``zero_to_fp32.py``), or the parts of
one tensor-parallel rank, as :mod:`deepspeed.inference.tensor` writes them: then the file's own header lists for each
tensor which part it is, so that ranks of any number find theirs.
"""

from __future__ import annotations

import functools
import json
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
"""Key of a file's header under which the parts are."""
DESCRIPTION = "ds_inference_config.json"
_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.pt")


@dataclass(frozen=True)
class Stored:
    """A tensor in an open file.

    Attributes:
        tile: Its name, its shape, and which part of the named tensor it is.
        is_part: Whether it comes from a file of parts, where other files have the others.
        read: Gives some of it by indices, or all of it for ``()``.
    """

    tile: Tile
    is_part: bool
    read: Callable[[tuple[slice, ...]], torch.Tensor]

    @property
    def is_whole(self) -> bool:
        """Returns whether it is the whole named tensor."""
        return not self.is_part

    def offset_in_named(self) -> int:
        """Returns the element of the flattened named tensor at which this one begins, as one contiguous part of it.

        Raises:
            CheckpointError: It is not contiguous, as rows are cut.
        """
        (region,) = self.tile.regions
        shape = self.tile.global_shape
        first = self._cut_dim
        if region.shape[first + 1 :] != shape[first + 1 :]:
            raise CheckpointError(
                f"init_inference: {self.tile.name!r} is stored in parts cut along more than one dimension; export "
                "whole weights (save_16bit_model, or save_pretrained in one process)"
            )
        place = 0
        for index, extent in zip(region.whole, shape, strict=True):
            place = place * extent + index
        return place

    def read_run(self, low: int, high: int) -> torch.Tensor:
        """Returns elements ``low`` to ``high`` of the flattened tensor in the file.

        Reads only the rows that hold them.
        """
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
        """Reads what of the named tensor lies in ``values``, and nothing else.

        Args:
            values: A tile of it, in the tile's shape.
            regions: What of it lies there.
        """
        for mine in regions:
            for theirs in self.tile.regions:
                if (common := in_common(mine, theirs)) is not None:
                    values[common[0]] = self.read(common[1]).to(values.dtype)


@dataclass(frozen=True)
class WeightFiles:
    """Lists the weight files of a checkpoint.

    Attributes:
        whole: Files of whole tensors.
        parts: Files of parts, one per rank that wrote.
        training: A folder of ``save_checkpoint``, in the place of both.
    """

    whole: tuple[Path, ...]
    parts: tuple[Path, ...] = ()
    training: Path | None = None

    def __str__(self) -> str:
        if self.training is not None:
            return f"checkpoint {self.training}"
        files = (*self.whole, *self.parts)
        return f"{len(files)} files ({files[0]} ...)" if len(files) > 1 else str(files[0])

    def tensors(self) -> Iterator[Stored]:
        """Yields every tensor, file by file. Each is valid until the next one is requested.

        Raises:
            CheckpointError: A file is damaged, or no file of weights.
        """
        if self.training is not None:
            yield from _trained(open_source(self.training))
        for path in (*self.whole, *self.parts):
            with _named(path):
                yield from _safetensors(path, path in self.parts) if path.suffix == ".safetensors" else _pickled(path)


def find_files(checkpoint: str | Mapping[str, Any], base: Path) -> WeightFiles:
    """Returns the files that ``init_inference(checkpoint=...)`` means.

    Args:
        checkpoint: A folder (of weights, or of ``save_checkpoint``), a file of weights, a JSON file, or what such a
            file holds.
        base: Folder that relative names start from.

    Raises:
        CheckpointError: There are none, or they are listed in a form that cannot be read.
    """
    if not isinstance(checkpoint, str):
        return _listed(checkpoint, base)
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
        return _listed(json.loads(path.read_text()), path.parent)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"init_inference: checkpoint {path} is no JSON: {error}; correct the file") from error


def _listed(description: Any, base: Path) -> WeightFiles:
    listed = description.get("checkpoints") if isinstance(description, Mapping) else None
    if isinstance(listed, str):
        return find_files(listed, Path(description.get("base_dir") or base))
    size = (description.get("tp_size") or description.get("mp_size") or 1) if listed else 1
    if not isinstance(size, int) or size < 1:
        raise CheckpointError(f"init_inference: checkpoint: tp_size: expected a number of files, found {size!r}")
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
            "the lists 'non_tp' and 'tp' as save_mp_checkpoint_path writes them; files that a training cut for "
            "several ranks are read by deepspeed.checkpoint, which writes whole ones"
        )
    if wrong := [name for name in (*names[0], *names[1]) if not isinstance(name, str)]:
        raise CheckpointError(f"init_inference: checkpoint: expected names of files, found {wrong[0]!r}")
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
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, RuntimeError, EOFError, UnpicklingError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"init_inference: {path} cannot be read ({error}); it is damaged or no file of weights. Write it "
            "again, or name another one"
        ) from error


def _safetensors(path: Path, is_part: bool) -> Iterator[Stored]:
    with safe_open(path, framework="pt") as opened:
        described = json.loads((opened.metadata() or {}).get(PARTS, "null"))
        if is_part and described is None:
            raise CheckpointError(f"init_inference: {path} does not list which parts of tensors it holds")
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
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"init_inference: {path} holds a {type(found).__name__}, no tensors by name; "
            "give files that hold a state dict"
        )
    found = found.get("module", found)
    for name, values in found.items():
        if isinstance(values, torch.Tensor):
            yield Stored(Tile(name, tuple(values.shape)), False, values.__getitem__)


def _trained(source: CheckpointSource) -> Iterator[Stored]:
    """Returns the tensors of a training checkpoint, under the names of the model that it was saved from."""
    for name, parameter in source.parameters.items():
        kind = MASTER if MASTER in parameter.kinds else COMPUTE
        read = functools.partial(_read_rows, source, kind, name, parameter.shape, parameter.kinds[kind])
        for called in (name, *(alias for alias, kept in source.aliases.items() if kept == name)):
            yield Stored(Tile(called, parameter.shape), False, read)
    for name, buffer in source.buffers.items():
        values = source.read_buffer(name)
        for called in (name, *(alias for alias, kept in source.aliases.items() if kept == name)):
            yield Stored(Tile(called, buffer.shape), False, values.__getitem__)


def _read_rows(
    source: CheckpointSource, kind: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, where: tuple[slice, ...]
) -> torch.Tensor:
    """Reads the rows that ``where`` touches (all for ``()``), verified, and returns what it requests of them."""
    width = prod(shape[1:])
    first, last = (where[0].start or 0, where[0].stop) if where else (0, shape[0] if shape else 1)
    rows = range(*slice(first, last).indices(shape[0] if shape else 1))
    wanted = Wanted(kind, name, rows.start * width, rows.stop * width)
    source.check([wanted])
    values = torch.empty((rows.stop - rows.start) * width, dtype=dtype)
    source.read(wanted, values)
    values = values.view(-1, *shape[1:]) if shape else values.view(())
    return values[(slice(None), *where[1:])] if where else values.view(shape)
