"""Upstream's import path for names of 6 modules."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.data import RepeatingLoader as RepeatingLoader
    from deepspeed.logging import log_dist as log_dist
    from deepspeed.logging import log_dist_once as log_dist_once
    from deepspeed.logging import logger as logger
    from deepspeed.logging import set_log_level_from_string as set_log_level_from_string
    from deepspeed.precision.on_device import OnDevice as OnDevice
    from deepspeed.profiling.ranges import instrument_w_nvtx as instrument_w_nvtx
    from deepspeed.utils import bwc as bwc
    from deepspeed.utils import comms_logging as comms_logging
    from deepspeed.utils import exceptions as exceptions
    from deepspeed.utils import groups as groups
    from deepspeed.utils import init_on_device as init_on_device
    from deepspeed.utils import logging as logging
    from deepspeed.utils import numa as numa
    from deepspeed.utils import nvtx as nvtx
    from deepspeed.utils import tensor_fragment as tensor_fragment
    from deepspeed.utils import timer as timer
    from deepspeed.utils import torch as torch
    from deepspeed.utils import zero_to_fp32 as zero_to_fp32
    from deepspeed.utils import zero_to_torch as zero_to_torch
    from deepspeed.utils.z3_leaf_module import get_z3_leaf_modules as get_z3_leaf_modules
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_module as set_z3_leaf_module
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules as set_z3_leaf_modules
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
    from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
    from deepspeed.utils.z3_leaf_module import unset_z3_leaf_modules as unset_z3_leaf_modules
    from deepspeed.utils.z3_leaf_module import z3_leaf_module as z3_leaf_module
    from deepspeed.utils.z3_leaf_module import z3_leaf_parameter as z3_leaf_parameter
    from deepspeed.zero.access.states import safe_get_full_fp32_param as safe_get_full_fp32_param
    from deepspeed.zero.access.states import safe_get_full_grad as safe_get_full_grad
    from deepspeed.zero.access.states import safe_get_full_optimizer_state as safe_get_full_optimizer_state
    from deepspeed.zero.access.states import safe_get_local_fp32_param as safe_get_local_fp32_param
    from deepspeed.zero.access.states import safe_get_local_grad as safe_get_local_grad
    from deepspeed.zero.access.states import safe_get_local_optimizer_state as safe_get_local_optimizer_state
    from deepspeed.zero.access.states import safe_set_full_fp32_param as safe_set_full_fp32_param
    from deepspeed.zero.access.states import safe_set_full_grad as safe_set_full_grad
    from deepspeed.zero.access.states import safe_set_full_optimizer_state as safe_set_full_optimizer_state
    from deepspeed.zero.access.states import safe_set_local_fp32_param as safe_set_local_fp32_param
    from deepspeed.zero.access.states import safe_set_local_grad as safe_set_local_grad
    from deepspeed.zero.access.states import safe_set_local_optimizer_state as safe_set_local_optimizer_state
    from deepspeed.zero.access.states import safe_update_full_grad_vectorized as safe_update_full_grad_vectorized

lazy_names(__name__)
