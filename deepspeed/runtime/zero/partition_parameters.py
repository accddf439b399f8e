"""Upstream's import path for names of ``accelerator``, ``zero``, ``zero.address`` and ``zero.construction.init``."""

from deepspeed.accelerator import get_accelerator as get_accelerator
from deepspeed.zero import DeepSpeedTensorOverride as DeepSpeedTensorOverride
from deepspeed.zero import GatheredParameters as GatheredParameters
from deepspeed.zero import Init as Init
from deepspeed.zero import MiCS_Init as MiCS_Init
from deepspeed.zero import ZeroParamStatus as ZeroParamStatus
from deepspeed.zero import ZeroParamType as ZeroParamType
from deepspeed.zero import register_external_parameter as register_external_parameter
from deepspeed.zero import unregister_external_parameter as unregister_external_parameter
from deepspeed.zero.address import is_zero_param as is_zero_param
from deepspeed.zero.construction.init import _orig_torch_arange as _orig_torch_arange
from deepspeed.zero.construction.init import (
    zero_wrapper_for_fp_tensor_constructor as zero_wrapper_for_fp_tensor_constructor,
)
