"""Measures every sample of a dataset, and writes the index files for curricula and for batches by length."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {"deepspeed.data.analysis.analyzer": "DataAnalyzer DistributedDataAnalyzer"},
)
