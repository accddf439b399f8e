"""ZeRO stages 1 and 2; re-exports; the code is in :mod:`deepspeed.zero.optimizer` and :mod:`deepspeed.plan`."""

from __future__ import annotations

from deepspeed.plan.memory_estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)
from deepspeed.zero.optimizer import DeepSpeedZeroOptimizer

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
