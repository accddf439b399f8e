"""Datasets of token sequences in two files, in the format that Megatron and DeepSpeed publish."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "MMapIndexedDataset": "deepspeed.data.indexed.dataset",
        "MMapIndexedDatasetBuilder": "deepspeed.data.indexed.dataset",
        "data_file_path": "deepspeed.data.indexed.format",
        "index_file_path": "deepspeed.data.indexed.format",
        "write_dataset": "deepspeed.data.indexed.dataset",
    },
)
