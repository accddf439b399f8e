"""ZeRO: divides the model states over the data-parallel ranks."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.zero.access.external import register_external_parameter as register_external_parameter
    from deepspeed.zero.access.external import unregister_external_parameter as unregister_external_parameter
    from deepspeed.zero.access.gathered import GatheredParameters as GatheredParameters
    from deepspeed.zero.access.parameter_offload import DeepSpeedZeRoOffload as DeepSpeedZeRoOffload
    from deepspeed.zero.access.parameter_offload import unwrap_model_for_generation as unwrap_model_for_generation
    from deepspeed.zero.access.views import DeepSpeedTensorOverride as DeepSpeedTensorOverride
    from deepspeed.zero.access.views import ZeroParamStatus as ZeroParamStatus
    from deepspeed.zero.access.views import ZeroParamType as ZeroParamType
    from deepspeed.zero.construction.init import Init as Init
    from deepspeed.zero.construction.init import MiCS_Init as MiCS_Init
    from deepspeed.zero.runtime import MicroBatch as MicroBatch
    from deepspeed.zero.tiled_linear import TiledLinear as TiledLinear
    from deepspeed.zero.tiled_linear import TiledLinearReturnBias as TiledLinearReturnBias

lazy_names(__name__)
