"""ZeRO: divides the model states over the data-parallel ranks."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.zero.access.views": "DeepSpeedTensorOverride ZeroParamStatus ZeroParamType",
        "deepspeed.zero.access.parameter_offload": "DeepSpeedZeRoOffload unwrap_model_for_generation",
        "deepspeed.zero.access.gathered": "GatheredParameters",
        "deepspeed.zero.construction.init": "Init MiCS_Init",
        "deepspeed.zero.runtime": "MicroBatch",
        "deepspeed.zero.tiled_linear": "TiledLinear TiledLinearReturnBias",
        "deepspeed.zero.access.external": "register_external_parameter unregister_external_parameter",
    },
)
