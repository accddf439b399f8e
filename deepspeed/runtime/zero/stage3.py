"""ZeRO stage 3; re-exports; the code is in :mod:`deepspeed.zero.optimizer` and :mod:`deepspeed.plan`."""

from __future__ import annotations

from deepspeed.plan.memory_estimates import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from deepspeed.zero.optimizer import DeepSpeedZeroOptimizer_Stage3

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]
