"""Upstream's import path for names of ``zero``, ``zero.access.parameter_offload`` and ``zero.tiled_linear``."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.zero import config as config
    from deepspeed.runtime.zero import offload_config as offload_config
    from deepspeed.runtime.zero import parameter_offload as parameter_offload
    from deepspeed.runtime.zero import partition_parameters as partition_parameters
    from deepspeed.runtime.zero import stage3 as stage3
    from deepspeed.runtime.zero import stage_1_and_2 as stage_1_and_2
    from deepspeed.runtime.zero import tiling as tiling
    from deepspeed.runtime.zero import utils as utils
    from deepspeed.zero import GatheredParameters as GatheredParameters
    from deepspeed.zero import Init as Init
    from deepspeed.zero import MiCS_Init as MiCS_Init
    from deepspeed.zero import ZeroParamStatus as ZeroParamStatus
    from deepspeed.zero import ZeroParamType as ZeroParamType
    from deepspeed.zero import register_external_parameter as register_external_parameter
    from deepspeed.zero import unwrap_model_for_generation as unwrap_model_for_generation
    from deepspeed.zero.access.parameter_offload import DeepSpeedZeRoOffload as DeepSpeedZeRoOffload
    from deepspeed.zero.tiled_linear import TiledLinear as TiledLinear
    from deepspeed.zero.tiled_linear import TiledLinearReturnBias as TiledLinearReturnBias

lazy_names(__name__)
