"""Upstream's import path for names of ``data.indexed.dataset`` and ``data.indexed.format``."""

from deepspeed.data.indexed.dataset import MMapIndexedDataset as MMapIndexedDataset
from deepspeed.data.indexed.dataset import MMapIndexedDatasetBuilder as MMapIndexedDatasetBuilder
from deepspeed.data.indexed.format import data_file_path as data_file_path
from deepspeed.data.indexed.format import index_file_path as index_file_path
