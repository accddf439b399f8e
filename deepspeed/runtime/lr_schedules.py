"""Learning-rate schedules; re-exports; the code is in :mod:`deepspeed.schedulers`."""

from __future__ import annotations

from deepspeed.schedulers import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    get_torch_optimizer,
    override_1cycle_params,
    override_lr_range_test_params,
    override_params,
    override_warmupLR_params,
    parse_arguments,
    update_lr,
)

__all__ = [
    "LRRangeTest",
    "OneCycle",
    "VALID_LR_SCHEDULES",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "get_torch_optimizer",
    "override_1cycle_params",
    "override_lr_range_test_params",
    "override_params",
    "override_warmupLR_params",
    "parse_arguments",
    "update_lr",
]
