"""Measures every sample of a dataset, and writes the index files for curricula and for batches by length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.data.analysis.analyzer import DataAnalyzer as DataAnalyzer
    from deepspeed.data.analysis.analyzer import DistributedDataAnalyzer as DistributedDataAnalyzer
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
