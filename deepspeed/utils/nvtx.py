"""Upstream's import path for names of ``profiling.ranges``."""

from deepspeed.profiling.ranges import instrument_w_nvtx as instrument_w_nvtx
