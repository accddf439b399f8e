"""Upstream's import path for names of ``compression.cleaning`` and ``compression.installing``."""

from deepspeed.compression.cleaning import redundancy_clean as redundancy_clean
from deepspeed.compression.installing import init_compression as init_compression
from deepspeed.compression.installing import student_initialization as student_initialization
