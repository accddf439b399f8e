"""Upstream's import path for names of ``engine.zero_optimizer``."""

from deepspeed.engine.zero_optimizer import DeepSpeedOptimizer as DeepSpeedOptimizer
from deepspeed.engine.zero_optimizer import ZeROOptimizer as ZeROOptimizer
