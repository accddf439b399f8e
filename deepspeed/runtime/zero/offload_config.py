"""Offload settings; the sections are in :mod:`deepspeed.config`.

The enumerations are defined here because checkpoints hold them pickled under this module's name.
"""

from __future__ import annotations

from enum import Enum

from deepspeed.config.sections.offload import OffloadOptimizer as DeepSpeedZeroOffloadOptimizerConfig
from deepspeed.config.sections.offload import OffloadParam as DeepSpeedZeroOffloadParamConfig

__all__ = [
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
]


class OffloadDeviceEnum(str, Enum):
    """Where shards live."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The kinds of state that ``engine.offload_states`` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
