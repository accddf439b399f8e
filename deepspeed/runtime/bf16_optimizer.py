"""Upstream's import path for names of ``engine.zero_optimizer``."""

from deepspeed.engine.zero_optimizer import BF16_Optimizer as BF16_Optimizer
