"""Reads and writes datasets of token sequences in two files, in the format that Megatron and DeepSpeed publish."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.data.indexed.dataset import MMapIndexedDataset as MMapIndexedDataset
    from deepspeed.data.indexed.dataset import MMapIndexedDatasetBuilder as MMapIndexedDatasetBuilder
    from deepspeed.data.indexed.dataset import write_dataset as write_dataset
    from deepspeed.data.indexed.format import data_file_path as data_file_path
    from deepspeed.data.indexed.format import index_file_path as index_file_path

lazy_names(__name__)
