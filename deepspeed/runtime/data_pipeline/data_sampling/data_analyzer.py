"""Upstream's import path for names of ``data.analysis.analyzer``."""

from deepspeed.data.analysis.analyzer import DataAnalyzer as DataAnalyzer
from deepspeed.data.analysis.analyzer import DistributedDataAnalyzer as DistributedDataAnalyzer
