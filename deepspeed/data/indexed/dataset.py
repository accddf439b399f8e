"""A dataset of token sequences in memory-mapped files, and its builder."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from deepspeed.data.indexed.format import code_of, data_file_path, index_file_path, read_index, write_index


class MMapIndexedDataset(Dataset[Any]):
    """Items of any length in ``NAME.bin``, with the index ``NAME.idx`` (:mod:`deepspeed.data.indexed.format`).

    Also reads files of Megatron. The returned arrays are 1-D, read-only views of the file.

    ``path`` has no extension; ``skip_warmup`` has no effect.

    Raises:
        FileNotFoundError: One of the files does not exist.
        ValueError: A file has another format, or is truncated.
    """

    def __init__(self, path: str | Path, skip_warmup: bool = False) -> None:
        super().__init__()
        self._path = str(path)
        self._index = read_index(path)
        # An empty file cannot be mapped.
        empty = not self._index.sizes.any()
        self._values: NDArray[Any] = (
            numpy.empty(0, self._index.dtype)
            if empty
            else numpy.memmap(data_file_path(path), mode="r", dtype=self._index.dtype)
        )

    def __getstate__(self) -> str:
        return self._path

    def __setstate__(self, path: str) -> None:
        self.__init__(path)  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._index.sizes)

    def __getitem__(self, index: int | slice) -> Any:
        """Returns one item, or for a slice without step the list of its items.

        Raises:
            IndexError: The dataset has no such item.
            ValueError: The slice has a step other than 1.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(
                    f"MMapIndexedDataset[{index}]: expected a slice without step, found the step {step}; take every "
                    f"{step}th of the list that the slice without step returns"
                )
            first = self._position(start) if start < stop else 0
            sizes = self._index.sizes[start:stop]
            values = self._values[first : first + int(sizes.sum(dtype=numpy.int64))]
            return numpy.split(values, numpy.cumsum(sizes[:-1], dtype=numpy.int64)) if len(sizes) else []
        return self.get(index)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Returns ``length`` values (None: all) of item ``idx``, from the end if negative, beginning at ``offset``.

        Raises:
            IndexError: The dataset has no such item, or the item has too few values.
        """
        number = idx + len(self) if idx < 0 else idx
        if not 0 <= number < len(self):
            raise IndexError(f"item {idx} of {self._path}: expected an index below {len(self)}, the number of items")
        size = int(self._index.sizes[number])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"item {idx} of {self._path}: expected offset and length within its {size} values, found {offset} and "
                f"{length}"
            )
        start = self._position(number) + offset
        return self._values[start : start + length]

    def _position(self, number: int) -> int:
        return int(self._index.offsets[number]) // self._index.dtype.itemsize

    @property
    def dtype(self) -> numpy.dtype[Any]:
        """Dtype of the values."""
        return self._index.dtype

    @property
    def sizes(self) -> NDArray[numpy.int32]:
        """Number of values of each item, ``[items]``."""
        return self._index.sizes

    def size(self, index: int) -> int:
        """Returns the number of values of one item."""
        return int(self._index.sizes[index])

    @property
    def values(self) -> NDArray[Any]:
        """The values of all items, one item after the other, 1-D."""
        return self._values

    @property
    def doc_idx(self) -> NDArray[numpy.int64]:
        """The indices of items at which documents begin, then the number of items; 1-D."""
        return self._index.documents

    def get_doc_idx(self) -> NDArray[numpy.int64]:
        """Returns the same as :attr:`doc_idx`."""
        return self._index.documents

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return max(len(self._index.documents) - 1, 0)

    def document(self, number: int) -> list[NDArray[Any]]:
        """Returns the items of one document.

        Raises:
            IndexError: The dataset has no such document.
        """
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number} of {self._path}: expected a number from 0 to {self.num_documents - 1}")
        start, stop = self._index.documents[number : number + 2].tolist()
        return list(self[start:stop])

    @property
    def supports_prefetch(self) -> bool:
        """False: the operating system reads ahead."""
        return False

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Returns whether both files exist."""
        return Path(index_file_path(path)).is_file() and Path(data_file_path(path)).is_file()


_MAX_VALUES = 2**31 - 1  # of an item: sizes are int32


class MMapIndexedDatasetBuilder:
    """Appends items to the ``.bin`` file ``out_file``, which is overwritten; :meth:`finalize` writes its ``.idx`` file.

    Args:
        for_megatron: Write Megatron's code of the dtype, which differs for 16-bit tokens.

    Raises:
        ValueError: The format does not have the dtype.
    """

    def __init__(self, out_file: str | Path, dtype: Any = numpy.int64, *, for_megatron: bool = False) -> None:
        code_of(dtype, for_megatron=for_megatron)
        self._dtype = numpy.dtype(dtype)
        self._for_megatron = for_megatron
        self._file = open(out_file, "wb")  # noqa: SIM115 - open until finalize
        self._sizes = array("i")
        self._documents = [0]

    def add_item(self, tensor: torch.Tensor | ArrayLike) -> None:
        """Appends one item: a tensor of any shape, flattened."""
        self.add_item_numpy(tensor.numpy() if isinstance(tensor, torch.Tensor) else numpy.asarray(tensor))

    def add_item_numpy(self, np_array: NDArray[Any]) -> None:
        """Appends an array of any shape, flattened.

        Raises:
            ValueError: The dataset's dtype cannot hold a value, or the array has more values than the format allows.
        """
        values = np_array.astype(self._dtype)
        if values.dtype != np_array.dtype and not numpy.array_equal(values, np_array):
            raise ValueError(
                f"add_item: expected values that {self._dtype.name} can hold, found {np_array.min()} to "
                f"{np_array.max()}; give the builder a wider dtype"
            )
        if values.size > _MAX_VALUES:
            raise ValueError(
                f"add_item: expected at most {_MAX_VALUES} values in an item, found {values.size}; split the item"
            )
        values.tofile(self._file)
        self._sizes.append(values.size)

    def add_items(self, arr_list: Iterable[torch.Tensor | ArrayLike]) -> None:
        """Appends several items, each a tensor or array of any shape."""
        for item in arr_list:
            self.add_item(item)

    def end_document(self) -> None:
        """Ends a document, which has the items since the last call or the start."""
        self._documents.append(len(self._sizes))

    def merge_file_(self, another_file: str | Path) -> None:
        """Appends another dataset (name without extension); earlier items that are in no document become one.

        Raises:
            ValueError: Its dtype is another one.
        """
        other = read_index(another_file)
        if other.dtype != self._dtype:
            raise ValueError(
                f"merge_file_: expected {self._dtype.name}, the dtype of this dataset, found {other.dtype.name} in "
                f"{another_file}; build both with one dtype"
            )
        before = len(self._sizes)
        if self._documents[-1] != before:
            self.end_document()
        self._sizes.extend(other.sizes.tolist())
        self._documents.extend((other.documents[1:] + before).tolist())
        with open(data_file_path(another_file), "rb") as file:
            shutil.copyfileobj(file, self._file)

    def finalize(self, index_file: str | Path) -> None:
        """Closes the ``.bin`` file and writes ``index_file``, the ``.idx`` file with its extension.

        If :meth:`end_document` was never called, every item is a document.
        """
        self._file.close()
        sizes = numpy.frombuffer(self._sizes, dtype=numpy.int32) if self._sizes else numpy.empty(0, numpy.int32)
        documents = self._documents if len(self._documents) > 1 else range(len(sizes) + 1)
        ends = numpy.fromiter(documents, dtype=numpy.int64)
        write_index(index_file, self._dtype, sizes, ends, for_megatron=self._for_megatron)


def write_dataset(prefix: str | Path, values: NDArray[Any], sizes: NDArray[Any]) -> None:
    """Writes a dataset: all values, item after item, 1-D, and the number of values of each item, ``[items]``."""
    assert int(sizes.sum()) == len(values)
    values.tofile(data_file_path(prefix))
    documents = numpy.arange(len(sizes) + 1, dtype=numpy.int64)
    write_index(index_file_path(prefix), values.dtype, sizes.astype(numpy.int32), documents)
