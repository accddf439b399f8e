"""Learning-rate schedules, stepped once per optimizer step."""

from deepspeed.schedulers.arguments import (
    add_tuning_arguments,
    get_config_from_args,
    get_lr_from_config,
    override_1cycle_params,
    override_lr_range_test_params,
    override_params,
    override_warmupLR_params,
    parse_arguments,
)
from deepspeed.schedulers.base import LrSchedule as Schedule
from deepspeed.schedulers.base import get_torch_optimizer, update_lr
from deepspeed.schedulers.build import SCHEDULES, VALID_LR_SCHEDULES, build_scheduler
from deepspeed.schedulers.one_cycle import OneCycle
from deepspeed.schedulers.range_test import LRRangeTest
from deepspeed.schedulers.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "SCHEDULES",
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "Schedule",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_tuning_arguments",
    "build_scheduler",
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
