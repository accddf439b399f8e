"""Upstream's import path for names of ``config.enums``, ``config.sections.offload`` and ``config.sections.zero``."""

from deepspeed.config.enums import OffloadDeviceEnum, ZeroStageEnum
from deepspeed.config.sections.offload import OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.config.sections.offload import OffloadParam as DeepSpeedZeroOffloadParamConfig
from deepspeed.config.sections.zero import ZeroOptimization as DeepSpeedZeroConfig

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
]
