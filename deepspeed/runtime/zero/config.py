"""ZeRO settings; the section is in :mod:`deepspeed.config`.

The enumeration is defined here because checkpoints hold it pickled under this module's name.
"""

from __future__ import annotations

from enum import IntEnum

from deepspeed.config.sections.zero import ZeroOptimization as DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)

__all__ = [
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
]


class ZeroStageEnum(IntEnum):
    """What a ZeRO stage shards, each with what comes before it."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
