"""Measures every sample of a dataset, and writes the index files for curricula and for batches by length."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.data.analysis.analyzer import DataAnalyzer as DataAnalyzer
    from deepspeed.data.analysis.analyzer import DistributedDataAnalyzer as DistributedDataAnalyzer

lazy_names(__name__)
