"""Saves and loads checkpoints, which any stage, number of ranks and parallel layout can read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.checkpoint import constants as constants
    from deepspeed.checkpoint import reshape_3d_utils as reshape_3d_utils
    from deepspeed.checkpoint import reshape_meg_2d as reshape_meg_2d
    from deepspeed.checkpoint import reshape_utils as reshape_utils
    from deepspeed.checkpoint import universal_checkpoint as universal_checkpoint
    from deepspeed.checkpoint import utils as utils
    from deepspeed.checkpoint import zero_checkpoint as zero_checkpoint
    from deepspeed.checkpoint.constants import (
        AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS as AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS,
    )
    from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE as BASE_OPTIMIZER_STATE
    from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE_STEP as BASE_OPTIMIZER_STATE_STEP
    from deepspeed.checkpoint.constants import BF16_ZERO_FILE_PREFIX as BF16_ZERO_FILE_PREFIX
    from deepspeed.checkpoint.constants import BUFFER_NAMES as BUFFER_NAMES
    from deepspeed.checkpoint.constants import CAT_DIM as CAT_DIM
    from deepspeed.checkpoint.constants import CHECKPOINT_PARALLEL_DIMS as CHECKPOINT_PARALLEL_DIMS
    from deepspeed.checkpoint.constants import CHECKPOINT_PP_DEGREE as CHECKPOINT_PP_DEGREE
    from deepspeed.checkpoint.constants import CHECKPOINT_TP_DEGREE as CHECKPOINT_TP_DEGREE
    from deepspeed.checkpoint.constants import CLIP_GRAD as CLIP_GRAD
    from deepspeed.checkpoint.constants import DS_VERSION as DS_VERSION
    from deepspeed.checkpoint.constants import EP_IS_EXPERT_PARAM as EP_IS_EXPERT_PARAM
    from deepspeed.checkpoint.constants import EP_NUM_EXPERTS as EP_NUM_EXPERTS
    from deepspeed.checkpoint.constants import EXPERT_PARAMETER_PATTERNS as EXPERT_PARAMETER_PATTERNS
    from deepspeed.checkpoint.constants import FP16_ZERO_FILE_PREFIX as FP16_ZERO_FILE_PREFIX
    from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS as FP32_FLAT_GROUPS
    from deepspeed.checkpoint.constants import FP32_GROUPS as FP32_GROUPS
    from deepspeed.checkpoint.constants import FP32_WEIGHT_KEY as FP32_WEIGHT_KEY
    from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS as FROZEN_PARAM_FRAGMENTS
    from deepspeed.checkpoint.constants import FROZEN_PARAM_SHAPES as FROZEN_PARAM_SHAPES
    from deepspeed.checkpoint.constants import GROUP_PADDINGS as GROUP_PADDINGS
    from deepspeed.checkpoint.constants import LAYER_FILE_PREFIX as LAYER_FILE_PREFIX
    from deepspeed.checkpoint.constants import LOSS_SCALER as LOSS_SCALER
    from deepspeed.checkpoint.constants import MODEL_FILE_PREFIX as MODEL_FILE_PREFIX
    from deepspeed.checkpoint.constants import MODEL_FILE_SUFFIX as MODEL_FILE_SUFFIX
    from deepspeed.checkpoint.constants import OPTIM_FILE_SUFFIX as OPTIM_FILE_SUFFIX
    from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT as OPTIMIZER_STATE_DICT
    from deepspeed.checkpoint.constants import ORIGINAL_VOCAB_SIZE as ORIGINAL_VOCAB_SIZE
    from deepspeed.checkpoint.constants import PADDED_VOCAB_SIZE as PADDED_VOCAB_SIZE
    from deepspeed.checkpoint.constants import PARAM as PARAM
    from deepspeed.checkpoint.constants import PARAM_ALIGNMENT_PADDINGS as PARAM_ALIGNMENT_PADDINGS
    from deepspeed.checkpoint.constants import PARAM_GROUPS as PARAM_GROUPS
    from deepspeed.checkpoint.constants import PARAM_N_SUB_PARAMS as PARAM_N_SUB_PARAMS
    from deepspeed.checkpoint.constants import PARAM_SHAPES as PARAM_SHAPES
    from deepspeed.checkpoint.constants import PARAM_SLICE_MAPPINGS as PARAM_SLICE_MAPPINGS
    from deepspeed.checkpoint.constants import PARAMETER_TO_AVERAGE_PATTERNS as PARAMETER_TO_AVERAGE_PATTERNS
    from deepspeed.checkpoint.constants import (
        PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 as PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0,
    )
    from deepspeed.checkpoint.constants import (
        PARAMETER_WITH_ROW_PARALLELISM_PATTERNS as PARAMETER_WITH_ROW_PARALLELISM_PATTERNS,
    )
    from deepspeed.checkpoint.constants import PARAMETER_WITH_SUB_PARAMS as PARAMETER_WITH_SUB_PARAMS
    from deepspeed.checkpoint.constants import PARTITION_COUNT as PARTITION_COUNT
    from deepspeed.checkpoint.constants import (
        PIPELINE_REPLICATED_PARAMETER_PATTERNS as PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    )
    from deepspeed.checkpoint.constants import SINGLE_PARTITION_OF_FP32_GROUPS as SINGLE_PARTITION_OF_FP32_GROUPS
    from deepspeed.checkpoint.constants import SUB_PARAM_SHAPE as SUB_PARAM_SHAPE
    from deepspeed.checkpoint.constants import SUB_PARAM_SHARD_WIDTHS as SUB_PARAM_SHARD_WIDTHS
    from deepspeed.checkpoint.constants import SUB_PARAMS_SHAPE as SUB_PARAMS_SHAPE
    from deepspeed.checkpoint.constants import TP_REPLICATED_PARAMETER_PATTERNS as TP_REPLICATED_PARAMETER_PATTERNS
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO as UNIVERSAL_CHECKPOINT_INFO
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_VERSION_KEY as UNIVERSAL_CHECKPOINT_VERSION_KEY
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_VERSION_VALUE as UNIVERSAL_CHECKPOINT_VERSION_VALUE
    from deepspeed.checkpoint.constants import VOCAB_TENSOR as VOCAB_TENSOR
    from deepspeed.checkpoint.constants import VOCABULARY_PARAMETER_PATTERNS as VOCABULARY_PARAMETER_PATTERNS
    from deepspeed.checkpoint.constants import ZERO_FILE_PREFIX as ZERO_FILE_PREFIX
    from deepspeed.checkpoint.constants import ZERO_STAGE as ZERO_STAGE
    from deepspeed.checkpoint.deepspeed_checkpoint import DeepSpeedCheckpoint as DeepSpeedCheckpoint
    from deepspeed.checkpoint.names import get_layer_ckpt_name_for_rank as get_layer_ckpt_name_for_rank
    from deepspeed.checkpoint.names import get_model_ckpt_name_for_rank as get_model_ckpt_name_for_rank
    from deepspeed.checkpoint.names import get_zero_ckpt_name_for_rank as get_zero_ckpt_name_for_rank
    from deepspeed.checkpoint.upstream.files import SubparamShape as SubparamShape
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
