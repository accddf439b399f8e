"""Saves and loads checkpoints, which any stage, number of ranks and parallel layout can read."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.checkpoint.constants": (
            "AUTOTP_UNSUPPORTED_PARAMETER_PATTERNS BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP "
            "BF16_ZERO_FILE_PREFIX BUFFER_NAMES CAT_DIM CHECKPOINT_PARALLEL_DIMS CHECKPOINT_PP_DEGREE "
            "CHECKPOINT_TP_DEGREE CLIP_GRAD DS_VERSION EP_IS_EXPERT_PARAM EP_NUM_EXPERTS "
            "EXPERT_PARAMETER_PATTERNS FP16_ZERO_FILE_PREFIX FP32_FLAT_GROUPS FP32_GROUPS FP32_WEIGHT_KEY "
            "FROZEN_PARAM_FRAGMENTS FROZEN_PARAM_SHAPES GROUP_PADDINGS LAYER_FILE_PREFIX LOSS_SCALER "
            "MODEL_FILE_PREFIX MODEL_FILE_SUFFIX OPTIMIZER_STATE_DICT OPTIM_FILE_SUFFIX ORIGINAL_VOCAB_SIZE "
            "PADDED_VOCAB_SIZE PARAM PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 "
            "PARAMETER_WITH_ROW_PARALLELISM_PATTERNS PARAMETER_WITH_SUB_PARAMS PARAM_ALIGNMENT_PADDINGS "
            "PARAM_GROUPS PARAM_N_SUB_PARAMS PARAM_SHAPES PARAM_SLICE_MAPPINGS PARTITION_COUNT "
            "PIPELINE_REPLICATED_PARAMETER_PATTERNS SINGLE_PARTITION_OF_FP32_GROUPS SUB_PARAMS_SHAPE "
            "SUB_PARAM_SHAPE SUB_PARAM_SHARD_WIDTHS TP_REPLICATED_PARAMETER_PATTERNS UNIVERSAL_CHECKPOINT_INFO "
            "UNIVERSAL_CHECKPOINT_VERSION_KEY UNIVERSAL_CHECKPOINT_VERSION_VALUE VOCABULARY_PARAMETER_PATTERNS "
            "VOCAB_TENSOR ZERO_FILE_PREFIX ZERO_STAGE"
        ),
        "deepspeed.checkpoint.deepspeed_checkpoint": "DeepSpeedCheckpoint",
        "deepspeed.checkpoint.names": (
            "get_layer_ckpt_name_for_rank get_model_ckpt_name_for_rank get_zero_ckpt_name_for_rank"
        ),
        "deepspeed.checkpoint.upstream.files": "SubparamShape",
    },
    submodules="constants utils",
)
