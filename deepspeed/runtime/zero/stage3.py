"""Upstream's import path for names of ``engine.zero_optimizer`` and ``plan.memory_estimates``."""

from deepspeed.engine.zero_optimizer import DeepSpeedZeroOptimizer_Stage3 as DeepSpeedZeroOptimizer_Stage3
from deepspeed.plan.memory_estimates import (
    estimate_zero3_model_states_mem_needs as estimate_zero3_model_states_mem_needs,
)
from deepspeed.plan.memory_estimates import (
    estimate_zero3_model_states_mem_needs_all_cold as estimate_zero3_model_states_mem_needs_all_cold,
)
from deepspeed.plan.memory_estimates import (
    estimate_zero3_model_states_mem_needs_all_live as estimate_zero3_model_states_mem_needs_all_live,
)
