"""Reads and writes datasets of token sequences in two files, in the format that Megatron and DeepSpeed publish."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.data.indexed.dataset": "MMapIndexedDataset MMapIndexedDatasetBuilder write_dataset",
        "deepspeed.data.indexed.format": "data_file_path index_file_path",
    },
)
