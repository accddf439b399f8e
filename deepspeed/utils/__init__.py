"""What programs import from ``deepspeed.utils``; re-exports only."""

from __future__ import annotations

from deepspeed.lazy import lazy_names
from deepspeed.logging import log_dist, log_dist_once, logger, set_log_level_from_string

# Also the name of the submodule, which must not win: hence not lazily.
from deepspeed.utils.z3_leaf_module import z3_leaf_module

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "OnDevice": "deepspeed.precision.on_device",
        "RepeatingLoader": "deepspeed.data",
        "get_z3_leaf_modules": "deepspeed.utils.z3_leaf_module",
        "groups": "deepspeed.comm.job.groups:",
        "instrument_w_nvtx": "deepspeed.profiling.ranges",
        "safe_get_full_fp32_param": "deepspeed.zero.access.states",
        "safe_get_full_grad": "deepspeed.zero.access.states",
        "safe_get_full_optimizer_state": "deepspeed.zero.access.states",
        "safe_get_local_fp32_param": "deepspeed.zero.access.states",
        "safe_get_local_grad": "deepspeed.zero.access.states",
        "safe_get_local_optimizer_state": "deepspeed.zero.access.states",
        "safe_set_full_fp32_param": "deepspeed.zero.access.states",
        "safe_set_full_grad": "deepspeed.zero.access.states",
        "safe_set_full_optimizer_state": "deepspeed.zero.access.states",
        "safe_set_local_fp32_param": "deepspeed.zero.access.states",
        "safe_set_local_grad": "deepspeed.zero.access.states",
        "safe_set_local_optimizer_state": "deepspeed.zero.access.states",
        "safe_update_full_grad_vectorized": "deepspeed.zero.access.states",
        "set_z3_leaf_module": "deepspeed.utils.z3_leaf_module",
        "set_z3_leaf_modules": "deepspeed.utils.z3_leaf_module",
        "set_z3_leaf_modules_by_name": "deepspeed.utils.z3_leaf_module",
        "set_z3_leaf_modules_by_suffix": "deepspeed.utils.z3_leaf_module",
        "unset_z3_leaf_modules": "deepspeed.utils.z3_leaf_module",
        "z3_leaf_parameter": "deepspeed.utils.z3_leaf_module",
    },
    submodules=[
        "comms_logging",
        "exceptions",
        "init_on_device",
        "logging",
        "numa",
        "nvtx",
        "tensor_fragment",
        "timer",
        "torch",
        "zero_to_fp32",
        "zero_to_torch",
    ],
)
__all__ += ["log_dist", "log_dist_once", "logger", "set_log_level_from_string", "z3_leaf_module"]
