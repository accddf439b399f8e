"""ZeRO; re-exports only."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "DeepSpeedZeRoOffload": "deepspeed.runtime.zero.parameter_offload",
        "GatheredParameters": "deepspeed.zero",
        "Init": "deepspeed.zero",
        "MiCS_Init": "deepspeed.zero",
        "TiledLinear": "deepspeed.runtime.zero.tiling",
        "TiledLinearReturnBias": "deepspeed.runtime.zero.tiling",
        "ZeroParamStatus": "deepspeed.zero",
        "ZeroParamType": "deepspeed.zero",
        "register_external_parameter": "deepspeed.zero",
        "unwrap_model_for_generation": "deepspeed.zero",
    },
    submodules=[
        "config",
        "offload_config",
        "parameter_offload",
        "partition_parameters",
        "stage3",
        "stage_1_and_2",
        "tiling",
        "utils",
    ],
)
