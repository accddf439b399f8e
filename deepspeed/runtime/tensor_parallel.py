"""Upstream's import path for names of ``config.sections.tensor_parallel``."""

from deepspeed.config.sections.tensor_parallel import TensorParallel as TPTrainingConfig
from deepspeed.config.sections.tensor_parallel import TpGroup as TPConfig

__all__ = ["TPConfig", "TPTrainingConfig"]
