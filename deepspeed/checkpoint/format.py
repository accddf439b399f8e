"""The files of a checkpoint and its manifest. Pure: no process group, no device, nothing executed.

A tag folder holds

- safetensors files, one per rank and *kind*, whose tensors are 1-D runs of the flat buffers of the model's buckets
  (:mod:`deepspeed.zero.tiling.layout`). The manifest lists them as ``pieces``: each is ``[start, stop)`` of the flat
  buffer of one bucket. No run depends on how many ranks wrote it, so any number of ranks can read it.
- small torch files with counters, schedules and the caller's own state, readable by torch's restricted loader.
- ``manifest.json``, written last: the layout (every parameter's name, shape and place, or those of the tiles that it
  was cut into, each once), every file with its size and a CRC-32 for each 4 MiB, every run, and a digest of all
  that. A folder without it is not a checkpoint.

Kinds: ``master`` (the values the optimizer updates), ``compute`` (the values the model computes with, where there is no
master, or where they are not just the master rounded), ``optimizer.<state>`` for each per-element optimizer state,
``buffers``, ``private`` (whole tensors that belong to one rank, ``checkpoint.private``), ``torch``.

Versions of the manifest: 1 has whole parameters only; 2 lists for each tile which regions of which parameter it holds
(:mod:`deepspeed.zero.tiling.tiles`). Both are read, 2 is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from deepspeed.errors import CheckpointError
from deepspeed.zero.tiling.layout import BucketLayout
from deepspeed.zero.tiling.tiles import Tile, TilePart, TileRegion, first_overlap

FORMAT = "deepspeed-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"

CHUNK_BYTES = 4 << 20
"""Bytes per CRC-32 of a file: the least that a reader must read to verify an element."""

MASTER = "master"
COMPUTE = "compute"
BUFFERS = "buffers"
PRIVATE = "private"
TORCH = "torch"
FOLDERS = "folders"
"""Key of the facts: of each rank the first rank that wrote into the same folder; absent where all wrote into one."""
STORED_BY = "checkpoint_engine"
"""Key of the facts: class of the checkpoint engine that stored the tensors; absent where files hold them."""
_OPTIMIZER = "optimizer."

_LARGEST_MANIFEST = 1 << 30
_HEADER_ALIGNMENT = 64  # so that mapped tensors are aligned
_LARGEST_NUMEL = 1 << 48
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")

# safetensors' names of dtypes, which the runs use too.
_DTYPE_CODES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODE_OF = {dtype: code for code, dtype in _DTYPE_CODES.items()}


def dtype_code(dtype: torch.dtype) -> str:
    """Returns the name of ``dtype`` in files. Raises CheckpointError: safetensors cannot hold it."""
    if dtype not in _CODE_OF:
        raise CheckpointError(
            f"a tensor of dtype {dtype} cannot be saved; convert it to one of {', '.join(_DTYPE_CODES)}"
        )
    return _CODE_OF[dtype]


def dtype_of(code: str) -> torch.dtype:
    """Returns the dtype that a file names ``code``. Raises CheckpointError: no dtype has this code."""
    if code not in _DTYPE_CODES:
        raise CheckpointError(f"unknown dtype {code!r} in a checkpoint; known are {', '.join(_DTYPE_CODES)}")
    return _DTYPE_CODES[code]


def optimizer_kind(state: str) -> str:
    """Returns the kind of the per-element optimizer state ``state``, such as ``exp_avg``."""
    return _OPTIMIZER + state


def state_of_kind(kind: str) -> str | None:
    """Returns the optimizer state that ``kind`` holds, or None for other kinds."""
    return kind.removeprefix(_OPTIMIZER) if kind.startswith(_OPTIMIZER) else None


@dataclass(frozen=True)
class SavedRun:
    """Elements ``[start, stop)`` of the flat buffer of bucket ``bucket``."""

    bucket: int  # index in the manifest's layout
    start: int  # first element
    stop: int  # one past the last
    dtype: torch.dtype  # the dtype of the elements
    offset: int  # first byte in the file

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return (self.stop - self.start) * self.dtype.itemsize


@dataclass(frozen=True)
class NamedTensor:
    """A tensor that is stored whole, under its own name (a buffer of the model)."""

    name: str  # qualified name
    shape: tuple[int, ...]
    dtype: torch.dtype  # the dtype of the elements
    offset: int  # first byte in the file

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SavedFile:
    """One file of a tag folder."""

    name: str  # file name, without folders
    kind: str  # what it holds; see the module
    size: int  # bytes
    checksums: tuple[int, ...]  # CRC-32 of each :data:`CHUNK_BYTES` of the file
    runs: tuple[SavedRun, ...] = ()  # runs of buckets in it
    tensors: tuple[NamedTensor, ...] = ()  # whole tensors in it


class SavedTile(NamedTuple):
    """A tile of a parameter, and where its values lie."""

    tile: Tile  # what it holds
    bucket: int  # index of its bucket
    start: int  # its first element there

    @property
    def stop(self) -> int:
        """Index after its last element in the bucket."""
        return self.start + self.tile.numel


@dataclass(frozen=True)
class Manifest:
    """Describes a checkpoint: its layout, files and parameters."""

    buckets: tuple[BucketLayout, ...]  # the layout that wrote it
    files: tuple[SavedFile, ...]  # all files but the manifest itself
    # numbers and names for people and for checks: ``tag``, ``written_by``, ``global_steps``, ``zero_stage``,
    # ``world_size``, ``precision``, ``optimizer``, ...
    facts: Mapping[str, Any]
    # further names of tied parameters and buffers, to the name they are stored under
    aliases: Mapping[str, str] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()  # parameters of the layout that were not saved (frozen ones, on request)
    frozen: frozenset[str] = frozenset()  # parameters that had no gradient when saved
    # by name of the parameter all tiles of it
    tiles: Mapping[str, tuple[SavedTile, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        table: dict[str, tuple[SavedTile, ...]] = {}
        for bucket in self.buckets:
            for tile, start in zip(bucket.tiles, bucket.starts, strict=True):
                table[tile.logical] = (*table.get(tile.logical, ()), SavedTile(tile, bucket.index, start))
        object.__setattr__(self, "tiles", table)

    def file(self, name: str) -> SavedFile | None:
        """Returns the file called ``name``."""
        return next((entry for entry in self.files if entry.name == name), None)

    # -- to and from JSON --------------------------------------------------------------------------------------------

    def encode(self) -> bytes:
        """Returns the bytes of ``manifest.json``."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "facts": dict(self.facts),
            "aliases": dict(self.aliases),
            "left_out": sorted(self.left_out),
            "frozen": sorted(self.frozen),
            "buckets": [_encode_bucket(bucket) for bucket in self.buckets],
            "files": [
                {
                    "name": entry.name,
                    "kind": entry.kind,
                    "size": entry.size,
                    "crc32": list(entry.checksums),
                    "pieces": [[p.bucket, p.start, p.stop, dtype_code(p.dtype), p.offset] for p in entry.runs],
                    "tensors": [[t.name, list(t.shape), dtype_code(t.dtype), t.offset] for t in entry.tensors],
                }
                for entry in self.files
            ],
        }
        text = _canonical(body)
        return f'{{"digest":"{_digest(text)}","manifest":{text}}}\n'.encode()

    @classmethod
    def decode(cls, data: bytes, where: str | os.PathLike[str]) -> Manifest:
        """Reads ``manifest.json``; everything in it is checked, nothing is trusted.

        Raises:
            CheckpointError: It is damaged, of a later version, or describes something impossible.
        """
        return _decode(data, _Checker(str(where)))

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads a tag folder's manifest. Raises CheckpointError: the file is unreadable, or too large for one."""
        path = folder / MANIFEST
        try:
            if path.stat().st_size > _LARGEST_MANIFEST:
                raise CheckpointError(
                    f"{path}: larger than any manifest can be; the checkpoint is damaged. Use another tag, or copy it "
                    "again"
                )
            data = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror}); the checkpoint is damaged") from error
        return cls.decode(data, path)


def _canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _encode_bucket(bucket: BucketLayout) -> dict[str, Any]:
    return {
        "dtype": bucket.dtype,
        "trainable": bucket.trainable,
        "numel": bucket.numel,
        "world_size": bucket.num_slices,
        "tiles": [
            [tile.name, list(tile.shape), start, tile.param_group, _encode_part(tile.part)]
            for tile, start in zip(bucket.tiles, bucket.starts, strict=True)
        ],
    }


def _encode_part(part: TilePart | None) -> list[Any] | None:
    if part is None:
        return None
    regions = [[list(region.whole), list(region.tile), list(region.shape)] for region in part.regions]
    return [part.name, list(part.global_shape), regions]


class _Checker:
    def __init__(self, where: str) -> None:
        self.where = where

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.where}: {what}. The checkpoint is damaged or was altered; use another tag, or copy it again from "
            "where it was written"
        )

    def get(self, container: Any, key: str, kind: type | tuple[type, ...]) -> Any:
        if not isinstance(container, dict) or key not in container:
            raise self.fail(f"{key!r} is missing")
        value = container[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise self.fail(f"{key!r} is a {type(value).__name__}")
        return value

    def number(self, value: Any, what: str, low: int = 0, high: int = _LARGEST_NUMEL) -> int:
        if type(value) is not int or not low <= value <= high:
            raise self.fail(f"{what} is {value!r}, expected an integer from {low} to {high}")
        return value

    def row(self, value: Any, length: int, what: str) -> list[Any]:
        if not isinstance(value, list) or len(value) != length:
            raise self.fail(f"{what} does not have {length} entries")
        return value

    def text(self, value: Any, what: str) -> str:
        if not isinstance(value, str) or not value or "\0" in value:
            raise self.fail(f"{what} is {value!r}, expected a name")
        return value

    def indices(self, value: Any, what: str) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > 64:
            raise self.fail(f"the shape of {what} is {value!r}")
        return tuple(self.number(entry, f"an extent of {what}") for entry in value)

    def shape(self, value: Any, what: str) -> tuple[int, ...]:
        shape = self.indices(value, what)
        self.number(prod(shape), f"the size of {what}")
        return shape


def _decode(data: bytes, check: _Checker) -> Manifest:
    try:
        outer = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise check.fail(f"not readable as JSON ({error})") from None
    body = check.get(outer, "manifest", dict)
    if body.get("format") != FORMAT:
        raise check.fail(f"'format' is {body.get('format')!r}, expected {FORMAT!r}")
    version = check.number(body.get("version"), "'version'", 1)
    if version > VERSION:
        raise CheckpointError(
            f"{check.where}: written in format version {version}, this release reads up to {VERSION}; upgrade deepspeed"
        )
    try:
        intact = _digest(_canonical(body)) == outer.get("digest")
    except (ValueError, RecursionError):
        intact = False
    if not intact:
        raise check.fail("its digest does not match its content")
    listed = check.get(body, "buckets", list)
    buckets = tuple(_decode_bucket(index, entry, check, version) for index, entry in enumerate(listed))
    files = tuple(_decode_file(entry, buckets, check) for entry in check.get(body, "files", list))
    if len({entry.name for entry in files}) != len(files):
        raise check.fail("a file occurs twice")
    manifest = Manifest(
        buckets=buckets,
        files=files,
        facts=check.get(body, "facts", dict),
        aliases={
            check.text(alias, "an alias"): check.text(name, "the name of an alias")
            for alias, name in check.get(body, "aliases", dict).items()
        },
        left_out=frozenset(_names(body, "left_out", check)),
        frozen=frozenset(_names(body, "frozen", check)),
    )
    for name, tiles in manifest.tiles.items():
        _check_tiles(name, tiles, buckets, check)
    return manifest


def _check_tiles(name: str, tiles: Sequence[SavedTile], buckets: Sequence[BucketLayout], check: _Checker) -> None:
    """Checks that a parameter's tiles agree on it, occur once, and overlap only in equal regions."""
    first = tiles[0].tile
    if len(tiles) == 1:
        return
    if any(entry.tile.global_shape != first.global_shape for entry in tiles):
        raise check.fail(f"tiles of parameter {name!r} disagree about its shape")
    if len({buckets[entry.bucket].dtype for entry in tiles}) > 1:
        raise check.fail(f"tiles of parameter {name!r} have different dtypes")
    held = [entry.tile.regions for entry in tiles if entry.tile.regions or entry.tile.part is None]
    if len(set(held)) != len(held):
        raise check.fail(f"parameter {name!r} occurs twice in the layout")
    regions = list({(region.whole, region.shape) for entry in tiles for region in entry.tile.regions})
    pair = first_overlap(regions)
    if pair is not None:
        raise check.fail(f"tiles of parameter {name!r} overlap at {regions[pair[0]][0]} and {regions[pair[1]][0]}")


def _names(body: dict[str, Any], key: str, check: _Checker) -> Iterable[str]:
    return (check.text(name, f"an entry of {key!r}") for name in check.get(body, key, list))


def _decode_bucket(index: int, entry: Any, check: _Checker, version: int) -> BucketLayout:
    numel = check.number(check.get(entry, "numel", int), "the size of a bucket")
    tiles, starts, end = [], [], 0
    for row in check.get(entry, "tiles", list):
        name, shape, start, group, *part = check.row(row, 4 if version == 1 else 5, "a parameter")
        try:
            tile = Tile(
                check.text(name, "the name of a parameter"),
                check.shape(shape, f"parameter {name!r}"),
                check.number(group, "a param group", -1),
                _decode_part(part[0], check) if part and part[0] is not None else None,
            )
        except ValueError as error:
            raise check.fail(str(error)) from None
        if check.number(start, f"the place of {name!r}", 0, numel) < end or start + tile.numel > numel:
            raise check.fail(f"parameter {name!r} lies outside its bucket or over its neighbor")
        end = start + tile.numel
        tiles.append(tile)
        starts.append(start)
    num_slices = check.number(check.get(entry, "world_size", int), "the number of ranks", 1, 1 << 32)
    return BucketLayout(
        index=index,
        tiles=tuple(tiles),
        starts=tuple(starts),
        dtype=check.text(check.get(entry, "dtype", str), "a dtype"),
        trainable=check.get(entry, "trainable", bool),
        num_slices=num_slices,
        numel=numel,
    )


def _decode_part(row: Any, check: _Checker) -> TilePart:
    name, shape, regions = check.row(row, 3, "the part of a tile")
    name = check.text(name, "the name of a parameter")
    if not isinstance(regions, list):
        raise check.fail(f"the regions of {name!r} are no list")
    made = []
    for region in regions:
        whole, tile, extents = check.row(region, 3, f"a region of {name!r}")
        what = f"a region of {name!r}"
        made.append(TileRegion(check.indices(whole, what), check.indices(tile, what), check.shape(extents, what)))
    return TilePart(name, check.shape(shape, f"parameter {name!r}"), tuple(made))


def _decode_file(entry: Any, buckets: Sequence[BucketLayout], check: _Checker) -> SavedFile:
    name = check.text(check.get(entry, "name", str), "the name of a file")
    if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
        raise check.fail(f"{name!r} is not the name of a file of a checkpoint")
    size = check.number(check.get(entry, "size", int), f"the size of {name!r}", 0, 1 << 56)
    checksums = check.get(entry, "crc32", list)
    if len(checksums) != -(-size // CHUNK_BYTES):
        raise check.fail(f"{name!r} has {len(checksums)} checksums for {size} bytes")
    runs = []
    for row in check.get(entry, "pieces", list):
        bucket, start, stop, code, offset = check.row(row, 5, f"a run of {name!r}")
        bucket = check.number(bucket, f"a bucket in {name!r}", 0, len(buckets) - 1)
        numel = buckets[bucket].numel
        stop = check.number(stop, f"the end of a run of {name!r}", 1, numel)
        start = check.number(start, f"the start of a run of {name!r}", 0, stop - 1)
        runs.append(SavedRun(bucket, start, stop, dtype_of(code), check.number(offset, f"an offset in {name!r}", 8)))
    tensors = []
    for row in check.get(entry, "tensors", list):
        tensor, shape, code, offset = check.row(row, 4, f"a tensor of {name!r}")
        tensors.append(
            NamedTensor(
                check.text(tensor, f"a tensor of {name!r}"),
                check.shape(shape, f"tensor {tensor!r}"),
                dtype_of(code),
                check.number(offset, f"an offset in {name!r}", 8),
            )
        )
    ends = [run.offset + run.nbytes for run in runs] + [held.offset + held.nbytes for held in tensors]
    if max(ends, default=0) > size:
        raise check.fail(f"{name!r} is too short for what it should hold")
    return SavedFile(
        name=name,
        kind=check.text(check.get(entry, "kind", str), "a kind"),
        size=size,
        checksums=tuple(check.number(value, "a checksum", 0, 0xFFFFFFFF) for value in checksums),
        runs=tuple(runs),
        tensors=tuple(tensors),
    )


def safetensors_header(
    entries: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: dict[str, str] | None = None
) -> bytes:
    """Returns the first bytes of a safetensors file whose tensors follow end to end, in this order."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, dtype, shape in entries:
        end = position + prod(shape) * dtype.itemsize
        header[name] = {"dtype": dtype_code(dtype), "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
