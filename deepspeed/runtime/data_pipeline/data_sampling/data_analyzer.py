"""Analysis of datasets; re-exports; the code is in :mod:`deepspeed.data.analysis`."""

from __future__ import annotations

from deepspeed.data.analysis.analyzer import DataAnalyzer
from deepspeed.data.analysis.distributed import DistributedDataAnalyzer

__all__ = ["DataAnalyzer", "DistributedDataAnalyzer"]
