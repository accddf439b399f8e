"""Upstream's import path for names of ``engine.zero_optimizer``."""

from deepspeed.engine.zero_optimizer import FP16_Optimizer as FP16_Optimizer
