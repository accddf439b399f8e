"""Upstream's import path for names of ``compression.feature``."""

from deepspeed.compression.feature import compression_scheduler as compression_scheduler
