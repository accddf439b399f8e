"""Writing an indexed dataset, item by item or all at once."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import ArrayLike, NDArray

from deepspeed.data.indexed.format import code_of, data_file_path, index_file_path, read_index, write_index

_MOST_VALUES = 2**31 - 1  # of an item: sizes are int32


class MMapIndexedDatasetBuilder:
    """Appends items to a ``.bin`` file; :meth:`finalize` writes its ``.idx`` file.

    Args:
        out_file: The ``.bin`` file, with its ending; what is in it is lost.
        dtype: Of the values.
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
            raise ValueError(f"add_item: an item has {values.size} values, and the format allows {_MOST_VALUES}")
        values.tofile(self._file)
        self._sizes.append(values.size)

    def add_items(self, arr_list: Iterable[torch.Tensor | ArrayLike]) -> None:
        """Appends several items, each in the shape that ``add_item`` takes."""
        for item in arr_list:
            self.add_item(item)

    def end_document(self) -> None:
        """The items since the last call, or the start, are a document."""
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

        Where :meth:`end_document` was never called, every item is a document of its own.
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
        values: Of all items, item after item; its type is that of the dataset.
        sizes: Values of each item.
    """
    assert int(sizes.sum()) == len(values)
    values.tofile(data_file_path(prefix))
    documents = numpy.arange(len(sizes) + 1, dtype=numpy.int64)
    write_index(index_file_path(prefix), values.dtype, sizes.astype(numpy.int32), documents)
