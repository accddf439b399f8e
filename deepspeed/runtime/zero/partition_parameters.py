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
        "ZeroParamStatus": "deepspeed.zero",
        "ZeroParamType": "deepspeed.zero",
        "register_external_parameter": "deepspeed.zero",
        "unregister_external_parameter": "deepspeed.zero",
    },
)
__all__ += ["get_accelerator"]
