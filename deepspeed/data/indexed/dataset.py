"""A dataset of token sequences in files, read without loading them."""

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
    """Items of any length in ``NAME.bin``, found through ``NAME.idx`` (:mod:`deepspeed.data.indexed.format`).

    Files of Megatron are read too. The returned arrays are read-only views of the file.

    Args:
        path: The name of both files without ending.
        skip_warmup: Accepted without effect: nothing is prefetched.

    Raises:
        FileNotFoundError: One of the files is not there.
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
        """Returns one item; for a slice without step the list of its items, in one read.

        Raises:
            IndexError: There is no such item.
            ValueError: The slice has a step.
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
            whole = self._values[first : first + int(sizes.sum(dtype=numpy.int64))]
            return numpy.split(whole, numpy.cumsum(sizes[:-1], dtype=numpy.int64)) if len(sizes) else []
        return self.get(index)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Returns a part of an item.

        Args:
            idx: Number of the item; negative ones count from the end.
            offset: Values left out at its beginning.
            length: How many values; None: to its end.

        Raises:
            IndexError: There is no such item, or it has fewer values.
        """
        number = idx + len(self) if idx < 0 else idx
        if not 0 <= number < len(self):
            raise IndexError(f"item {idx}: {self._path} has {len(self)} items")
        size = int(self._index.sizes[number])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"item {idx} of {self._path} has {size} values, so there are no {length} from {offset} on")
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
        """Values of each item."""
        return self._index.sizes

    def size(self, index: int) -> int:
        """Returns the number of values of one item."""
        return int(self._index.sizes[index])

    @property
    def values(self) -> NDArray[Any]:
        """All values, item after item."""
        return self._values

    @property
    def doc_idx(self) -> NDArray[numpy.int64]:
        """The items at which documents begin, and the number of items."""
        return self._index.documents

    def get_doc_idx(self) -> NDArray[numpy.int64]:
        """Returns the same as :attr:`doc_idx`."""
        return self._index.documents

    @property
    def num_documents(self) -> int:
        """How many documents the items belong to."""
        return max(len(self._index.documents) - 1, 0)

    def document(self, number: int) -> list[NDArray[Any]]:
        """Returns the items of one document.

        Raises:
            IndexError: There is no document ``number``.
        """
        if not 0 <= number < self.num_documents:
            raise IndexError(f"document {number}: {self._path} has {self.num_documents} documents")
        start, stop = self._index.documents[number : number + 2].tolist()
        return list(self[start:stop])

    @property
    def supports_prefetch(self) -> bool:
        """Always False: the operating system reads ahead."""
        return False

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Returns whether both files are there."""
        return Path(index_file_path(path)).is_file() and Path(data_file_path(path)).is_file()


_MOST_VALUES = 2**31 - 1  # of an item: sizes are int32


class MMapIndexedDatasetBuilder:
    """Appends items to a ``.bin`` file; :meth:`finalize` writes its ``.idx`` file.

    Args:
        out_file: The ``.bin`` file, with its ending; what is in it is lost.
        dtype: The dtype of the values.
        for_megatron: Write the type as Megatron's readers understand it, which differs for 16-bit tokens.

    Raises:
        ValueError: The format has no such type.
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
        """Appends an array, flattened.

        Raises:
            ValueError: Values do not fit the dtype of the dataset, or the array has more than the format allows.
        """
        values = np_array.astype(self._dtype)
        if values.dtype != np_array.dtype and not numpy.array_equal(values, np_array):
            raise ValueError(
                f"add_item: values from {np_array.min()} to {np_array.max()} do not fit {self._dtype.name}, the type "
                "of this dataset; make the builder with a larger one"
            )
        if values.size > _MOST_VALUES:
            raise ValueError(
                f"add_item: an item has {values.size} values, and the format allows {_MOST_VALUES}; split the item"
            )
        values.tofile(self._file)
        self._sizes.append(values.size)

    def add_items(self, arr_list: Iterable[torch.Tensor | ArrayLike]) -> None:
        """Appends several items, each in the shape that ``add_item`` takes."""
        for item in arr_list:
            self.add_item(item)

    def end_document(self) -> None:
        """Ends a document: the items since the last call, or since the start."""
        self._documents.append(len(self._sizes))

    def merge_file_(self, another_file: str | Path) -> None:
        """Appends another dataset with its documents; what came before and is in none becomes one.

        Args:
            another_file: Name of its files without ending.

        Raises:
            ValueError: Its type is another one.
        """
        other = read_index(another_file)
        if other.dtype != self._dtype:
            raise ValueError(
                f"merge_file_: {another_file} holds {other.dtype.name}, this dataset {self._dtype.name}; build both "
                "with one type"
            )
        before = len(self._sizes)
        if self._documents[-1] != before:
            self.end_document()
        self._sizes.extend(other.sizes.tolist())
        self._documents.extend((other.documents[1:] + before).tolist())
        with open(data_file_path(another_file), "rb") as file:
            shutil.copyfileobj(file, self._file)

    def finalize(self, index_file: str | Path) -> None:
        """Ends the ``.bin`` file and writes the ``.idx`` file, given with its ending.

        If :meth:`end_document` was never called, every item is a document.
        """
        self._file.close()
        sizes = numpy.frombuffer(self._sizes, dtype=numpy.int32) if self._sizes else numpy.empty(0, numpy.int32)
        documents = self._documents if len(self._documents) > 1 else range(len(sizes) + 1)
        ends = numpy.fromiter(documents, dtype=numpy.int64)
        write_index(index_file, self._dtype, sizes, ends, for_megatron=self._for_megatron)


def write_dataset(prefix: str | Path, values: NDArray[Any], sizes: NDArray[Any]) -> None:
    """Writes a whole dataset.

    Args:
        prefix: Name of both files without ending.
        values: Values of all items, item after item; their dtype is that of the dataset.
        sizes: Values of each item.
    """
    assert int(sizes.sum()) == len(values)
    values.tofile(data_file_path(prefix))
    documents = numpy.arange(len(sizes) + 1, dtype=numpy.int64)
    write_index(index_file_path(prefix), values.dtype, sizes.astype(numpy.int32), documents)
