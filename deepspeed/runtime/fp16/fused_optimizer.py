"""Upstream's import path for names of ``zero.update.optimizer``."""

from deepspeed.zero.update.optimizer import FP16_Optimizer as FP16_Optimizer
