"""The two files of an indexed dataset, as Megatron and DeepSpeed publish them.

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
# Megatron agrees on 1 to 5 and has these for the rest. The number of bytes of a value distinguishes the two.
_MEGATRON: dict[int, type[numpy.generic]] = {6: numpy.float64, 7: numpy.float64, 8: numpy.uint16}


def code_of(dtype: Any, *, for_megatron: bool = False) -> int:
    """Returns the code of a type.

    Args:
        dtype: A numpy type.
        for_megatron: As Megatron's readers understand it: 16-bit tokens have another code there.

    Raises:
        ValueError: The format has no such type.
    """
    codes = {**_CODES, **_MEGATRON} if for_megatron else _CODES
    for code, known in codes.items():
        if numpy.dtype(known) == numpy.dtype(dtype):
            return code
    names = ", ".join(sorted({numpy.dtype(known).name for known in codes.values()}))
    raise ValueError(
        f"an indexed dataset cannot hold {numpy.dtype(dtype).name}; expected one of {names}. Convert the values first"
    )


def type_of(code: int, count: int, nbytes: int) -> numpy.dtype[Any] | None:
    """Returns the type that a code stands for in a file with so many values in so many bytes; None if there is none."""
    for codes in (_CODES, _MEGATRON):
        if code in codes and numpy.dtype(codes[code]).itemsize * count == nbytes:
            return numpy.dtype(codes[code])
    return None


def smallest_type(least: int, greatest: int) -> type[numpy.generic]:
    """Returns the smallest integer type that holds all from ``least`` to ``greatest``.

    Raises:
        ValueError: None does.
    """
    kinds: tuple[type[Any], ...] = (numpy.uint8, numpy.uint16, numpy.uint32, numpy.uint64)
    if least < 0:
        kinds = (numpy.int8, numpy.int16, numpy.int32, numpy.int64)
    for kind in kinds:
        if numpy.iinfo(kind).min <= least and greatest <= numpy.iinfo(kind).max:
            return kind
    raise ValueError(f"no integer type holds {least} to {greatest}")


def index_file_path(prefix: str | Path) -> str:
    """Returns the file of sizes and offsets."""
    return f"{prefix}.idx"


def data_file_path(prefix: str | Path) -> str:
    """Returns the file of values."""
    return f"{prefix}.bin"


@dataclass(frozen=True)
class Index:
    """Holds the content of an ``.idx`` file; arrays that were read stay in the file (memory-mapped).

    Attributes:
        dtype: The dtype of the values.
        sizes: int32, values per item.
        offsets: int64, bytes before each item.
        documents: int64, the items at which documents begin, and the number of items.
    """

    dtype: numpy.dtype[Any]
    sizes: NDArray[numpy.int32]
    offsets: NDArray[numpy.int64]
    documents: NDArray[numpy.int64]


def write_index(
    path: str | Path,
    dtype: Any,
    sizes: NDArray[numpy.int32],
    documents: NDArray[numpy.int64],
    *,
    for_megatron: bool = False,
) -> None:
    """Writes an ``.idx`` file for items that lie one after the other.

    Args:
        path: With its ending.
        dtype: The dtype of the values.
        sizes: Values per item.
        documents: The items at which documents begin, and the number of items.
        for_megatron: As Megatron's readers understand the type.
    """
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
        FileNotFoundError: One of the two is not there.
        ValueError: It is not such a file, or one of the two was cut off.
    """
    path, data = Path(index_file_path(prefix)), Path(data_file_path(prefix))
    for each in (path, data):
        if not each.is_file():
            raise FileNotFoundError(
                f"{each} is not there; an indexed dataset is named without ending and consists of NAME.idx and NAME.bin"
            )
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise ValueError(f"{path} is not the index of a dataset: it does not begin with {MAGIC!r}")
    _, version, code, count, num_documents = _HEAD.unpack(head)
    if version != VERSION:
        raise ValueError(f"{path} has version {version} of the format; only version {VERSION} is known")
    expected = _HEAD.size + 12 * count + 8 * num_documents
    if path.stat().st_size != expected:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, not the {expected} of {count} items; copy it again")
    mapped = numpy.memmap(path, mode="r", dtype=numpy.uint8)
    ends = [_HEAD.size, _HEAD.size + 4 * count, _HEAD.size + 12 * count, expected]
    # The arrays are not aligned in the file, which numpy copes with.
    sizes, offsets, documents = (
        numpy.frombuffer(mapped, dtype=kind, count=(end - start) // int(kind[-1]), offset=start)
        for kind, start, end in zip(("<i4", "<i8", "<i8"), ends[:-1], ends[1:], strict=True)
    )
    total, nbytes = int(sizes.sum(dtype=numpy.int64)), data.stat().st_size
    dtype = type_of(code, total, nbytes)
    if dtype is None:
        raise ValueError(
            f"{path} lists {total} values of the type with code {code}, and {data} has {nbytes} bytes, which does not "
            "fit; one of the two files was cut off or belongs to another dataset"
        )
    return Index(dtype, sizes, offsets, documents)
