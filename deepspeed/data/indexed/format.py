"""Reads and writes the index of an indexed dataset, in the format that Megatron and DeepSpeed publish.

``NAME.bin`` has the values of all items, one after the other, and nothing else. ``NAME.idx`` has, little-endian:

========================  ====================================================================
9 bytes                   ``MMIDIDX``, two zeros
uint64                    version, 1
uint8                     code of the values' type
uint64                    number of items
uint64                    length of the list of documents
int32 per item            number of values
int64 per item            where its values begin in ``.bin``, in bytes
int64 per list entry      number of the item at which a document begins; the last entry is the number of items
========================  ====================================================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEAD = struct.Struct("<9sQBQQ")

_CODES: dict[int, type[numpy.generic]] = {
    1: numpy.uint8,
    2: numpy.int8,
    3: numpy.int16,
    4: numpy.int32,
    5: numpy.int64,
    6: numpy.uint16,
    7: numpy.uint32,
    8: numpy.uint64,
}
# Megatron's codes 1 to 5 are the same, and the others these. The bytes per value distinguish the two tables.
_MEGATRON: dict[int, type[numpy.generic]] = {6: numpy.float64, 7: numpy.float64, 8: numpy.uint16}


def code_of(dtype: Any, *, for_megatron: bool = False) -> int:
    """Returns the code of a numpy dtype, Megatron's for 16-bit tokens on request; ValueError where there is none."""
    codes = {**_CODES, **_MEGATRON} if for_megatron else _CODES
    for code, known in codes.items():
        if numpy.dtype(known) == numpy.dtype(dtype):
            return code
    names = ", ".join(sorted({numpy.dtype(known).name for known in codes.values()}))
    raise ValueError(
        f"indexed dataset: expected one of {names}, found {numpy.dtype(dtype).name}; convert the values first"
    )


def type_of(code: int, count: int, nbytes: int) -> numpy.dtype[Any] | None:
    """Returns the dtype of a code in a file with ``count`` values in ``nbytes``; None if none fits."""
    for codes in (_CODES, _MEGATRON):
        if code in codes and numpy.dtype(codes[code]).itemsize * count == nbytes:
            return numpy.dtype(codes[code])
    return None


def smallest_type(least: int, greatest: int) -> type[numpy.generic]:
    """Returns the smallest integer type from ``least`` to ``greatest``; raises ValueError where none holds them."""
    kinds: tuple[type[Any], ...] = (numpy.uint8, numpy.uint16, numpy.uint32, numpy.uint64)
    if least < 0:
        kinds = (numpy.int8, numpy.int16, numpy.int32, numpy.int64)
    for kind in kinds:
        if numpy.iinfo(kind).min <= least and greatest <= numpy.iinfo(kind).max:
            return kind
    raise ValueError(f"values from {least} to {greatest}: expected a range of 64 bits; reduce the values")


def index_file_path(prefix: str | Path) -> str:
    """Returns the name of the file of sizes and offsets."""
    return f"{prefix}.idx"


def data_file_path(prefix: str | Path) -> str:
    """Returns the name of the file of values."""
    return f"{prefix}.bin"


@dataclass(frozen=True)
class Index:
    """Holds the content of an ``.idx`` file, in arrays that are memory-mapped."""

    dtype: numpy.dtype[Any]  # the dtype of the values
    sizes: NDArray[numpy.int32]  # int32 ``[items]``, the number of values of each item
    offsets: NDArray[numpy.int64]  # int64 ``[items]``, the bytes before each item
    # int64 1-D, the indices of items at which documents begin, then the number of items
    documents: NDArray[numpy.int64]


def write_index(
    path: str | Path,
    dtype: Any,
    sizes: NDArray[numpy.int32],
    documents: NDArray[numpy.int64],
    *,
    for_megatron: bool = False,
) -> None:
    """Writes an ``.idx`` file for contiguous items; documents are first items, then the number of items."""
    offsets = numpy.zeros(len(sizes), dtype="<i8")
    numpy.cumsum(sizes[:-1], dtype=numpy.int64, out=offsets[1:])
    offsets *= numpy.dtype(dtype).itemsize
    with open(path, "wb") as file:
        file.write(_HEAD.pack(MAGIC, VERSION, code_of(dtype, for_megatron=for_megatron), len(sizes), len(documents)))
        for array, kind in ((sizes, "<i4"), (offsets, "<i8"), (documents, "<i8")):
            numpy.ascontiguousarray(array, dtype=kind).tofile(file)


def read_index(prefix: str | Path) -> Index:
    """Opens the ``.idx`` file of a dataset and compares it with the size of the ``.bin`` file.

    Raises:
        FileNotFoundError: One of the two files does not exist.
        ValueError: The file is no index, or one of the two files is truncated.
    """
    path, data = Path(index_file_path(prefix)), Path(data_file_path(prefix))
    for each in (path, data):
        if not each.is_file():
            raise FileNotFoundError(
                f"{each} does not exist; give the name of an indexed dataset, NAME of its files NAME.idx and NAME.bin"
            )
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise ValueError(f"{path}: expected the index of a dataset, which begins with {MAGIC!r}; give another file")
    _, version, code, count, num_documents = _HEAD.unpack(head)
    if version != VERSION:
        raise ValueError(f"{path}: expected version {VERSION} of the format, found {version}; convert the file")
    expected = _HEAD.size + 12 * count + 8 * num_documents
    if path.stat().st_size != expected:
        raise ValueError(
            f"{path}: expected {expected} bytes for {count} items, found {path.stat().st_size}; copy the file again"
        )
    mapped = numpy.memmap(path, mode="r", dtype=numpy.uint8)
    ends = [_HEAD.size, _HEAD.size + 4 * count, _HEAD.size + 12 * count, expected]
    # The arrays are not aligned in the file; numpy supports that.
    sizes, offsets, documents = (
        numpy.frombuffer(mapped, dtype=kind, count=(end - start) // int(kind[-1]), offset=start)
        for kind, start, end in zip(("<i4", "<i8", "<i8"), ends[:-1], ends[1:], strict=True)
    )
    total, nbytes = int(sizes.sum(dtype=numpy.int64)), data.stat().st_size
    dtype = type_of(code, total, nbytes)
    if dtype is None:
        raise ValueError(
            f"{path} lists {total} values of the dtype with code {code}, but {data} has {nbytes} bytes: one of the two "
            "files is truncated or belongs to another dataset; copy both again"
        )
    return Index(dtype, sizes, offsets, documents)
