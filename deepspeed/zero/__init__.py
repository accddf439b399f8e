"""ZeRO: model states placed over the data-parallel ranks."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "DeepSpeedTensorOverride": "deepspeed.zero.views",
        "DeepSpeedZeRoOffload": "deepspeed.zero.parameter_offload",
        "GatheredParameters": "deepspeed.zero.gathered",
        "Init": "deepspeed.zero.init",
        "MiCS_Init": "deepspeed.zero.init",
        "ZeroParamStatus": "deepspeed.zero.views",
        "ZeroParamType": "deepspeed.zero.views",
        "register_external_parameter": "deepspeed.zero.external",
        "unregister_external_parameter": "deepspeed.zero.external",
        "unwrap_model_for_generation": "deepspeed.zero.parameter_offload",
    },
)
