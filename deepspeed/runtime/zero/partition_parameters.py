"""Partitioned parameters; re-exports from :mod:`deepspeed.zero`."""

from __future__ import annotations

from deepspeed.accelerator import get_accelerator
from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "DeepSpeedTensorOverride": "deepspeed.zero",
        "GatheredParameters": "deepspeed.zero",
        "Init": "deepspeed.zero",
        "MiCS_Init": "deepspeed.zero",
        "ZeroParamStatus": "deepspeed.zero",
        "ZeroParamType": "deepspeed.zero",
        "is_zero_param": "deepspeed.runtime.zero.utils",
        "register_external_parameter": "deepspeed.zero",
        "unregister_external_parameter": "deepspeed.zero",
        "zero_wrapper_for_fp_tensor_constructor": "deepspeed.zero.construction.constructors",
        "_orig_torch_arange": "deepspeed.zero.construction.constructors",
    },
)
__all__ += ["get_accelerator"]
