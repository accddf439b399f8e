"""Upstream's import path for names of ``zero.update.optimizer``."""

from deepspeed.zero.update.optimizer import BF16_Optimizer as BF16_Optimizer
