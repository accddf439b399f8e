"""Indexed datasets; re-exports; the code is in :mod:`deepspeed.data.indexed`."""

from __future__ import annotations

from deepspeed.data.indexed.builder import MMapIndexedDatasetBuilder
from deepspeed.data.indexed.dataset import MMapIndexedDataset
from deepspeed.data.indexed.format import data_file_path, index_file_path

__all__ = ["MMapIndexedDataset", "MMapIndexedDatasetBuilder", "data_file_path", "index_file_path"]
