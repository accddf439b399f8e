"""The engine: ``deepspeed.initialize`` and what it returns."""

from deepspeed.engine.arguments import add_config_arguments
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.initialize import initialize
from deepspeed.engine.zero_optimizer import DeepSpeedOptimizer, ZeROOptimizer

__all__ = ["DeepSpeedEngine", "DeepSpeedOptimizer", "ZeROOptimizer", "add_config_arguments", "initialize"]
