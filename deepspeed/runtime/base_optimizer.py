"""Upstream's import path for names of ``zero.update.base_optimizer``."""

from deepspeed.zero.update.base_optimizer import DeepSpeedOptimizer as DeepSpeedOptimizer
from deepspeed.zero.update.base_optimizer import ZeROOptimizer as ZeROOptimizer
