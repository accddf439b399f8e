"""Upstream's import path for names of ``ops.onebit.zero_one``."""

from deepspeed.ops.onebit.zero_one import ZeroOneAdam as ZeroOneAdam
