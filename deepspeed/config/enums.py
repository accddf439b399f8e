"""Enumerations that programs import to spell values of the configuration."""

from __future__ import annotations

from enum import Enum, IntEnum


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


class ZeroStageEnum(IntEnum):
    """What a ZeRO stage shards, each with what comes before it."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
