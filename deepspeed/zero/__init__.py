"""ZeRO: divides the model states over the data-parallel ranks."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "DeepSpeedTensorOverride": "deepspeed.zero.access.views",
        "DeepSpeedZeRoOffload": "deepspeed.zero.access.parameter_offload",
        "GatheredParameters": "deepspeed.zero.access.gathered",
        "Init": "deepspeed.zero.construction.init",
        "MiCS_Init": "deepspeed.zero.construction.init",
        "MicroBatch": "deepspeed.zero.runtime",
        "TiledLinear": "deepspeed.zero.tiled_linear",
        "TiledLinearReturnBias": "deepspeed.zero.tiled_linear",
        "ZeroParamStatus": "deepspeed.zero.access.views",
        "ZeroParamType": "deepspeed.zero.access.views",
        "register_external_parameter": "deepspeed.zero.access.external",
        "unregister_external_parameter": "deepspeed.zero.access.external",
        "unwrap_model_for_generation": "deepspeed.zero.access.parameter_offload",
    },
)
