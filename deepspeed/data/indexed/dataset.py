"""A dataset of token sequences in files, read without loading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from torch.utils.data import Dataset

from deepspeed.data.indexed.format import data_file_path, index_file_path, read_index


class MMapIndexedDataset(Dataset[Any]):
    """Items of any length in ``NAME.bin``, found through ``NAME.idx`` (:mod:`deepspeed.data.indexed.format`).

    Files of Megatron are read too. Arrays that it gives are read-only views of the file.

    Args:
        path: The name of both files without ending.
        skip_warmup: Accepted for programs of old; nothing is read ahead.

    Raises:
        FileNotFoundError: One of the files is not there.
        ValueError: They are not such files, or cut off.
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
        """One item; for a slice without step the list of its items, which costs one read.

        Raises:
            IndexError: There is no such item.
            ValueError: The slice has a step.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"MMapIndexedDataset[{index}]: slices must be without step")
            first = self._position(start) if start < stop else 0
            sizes = self._index.sizes[start:stop]
            whole = self._values[first : first + int(sizes.sum(dtype=numpy.int64))]
            return numpy.split(whole, numpy.cumsum(sizes[:-1], dtype=numpy.int64)) if len(sizes) else []
        return self.get(index)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Part of an item.

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
        """Values of one item."""
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
