"""Upstream's import path for names of ``config.enums`` and ``config.sections.offload``."""

from deepspeed.config.enums import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.config.sections.offload import OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.config.sections.offload import OffloadParam as DeepSpeedZeroOffloadParamConfig

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]
