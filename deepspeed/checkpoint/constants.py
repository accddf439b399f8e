"""Keys and file names of checkpoints of the original package, for programs that look into such files themselves.

The checkpoints of this package are another format (:mod:`deepspeed.checkpoint.format`).
"""

from __future__ import annotations

# Optimizer-states files
OPTIMIZER_STATE_DICT = "optimizer_state_dict"
FP32_GROUPS = "fp32_groups"
FP32_FLAT_GROUPS = "fp32_flat_groups"
BASE_OPTIMIZER_STATE = "base_optimizer_state"
SINGLE_PARTITION_OF_FP32_GROUPS = "single_partition_of_fp32_groups"
PARAM_GROUPS = "param_groups"
GROUP_PADDINGS = "group_paddings"
PARTITION_COUNT = "partition_count"
PARAM_SLICE_MAPPINGS = "param_slice_mappings"
ZERO_STAGE = "zero_stage"
CLIP_GRAD = "clip_grad"
LOSS_SCALER = "loss_scaler"

# Model-states files
DS_VERSION = "ds_version"
PARAM_SHAPES = "param_shapes"
BUFFER_NAMES = "buffer_names"
FROZEN_PARAM_SHAPES = "frozen_param_shapes"
FROZEN_PARAM_FRAGMENTS = "frozen_param_fragments"
UNIVERSAL_CHECKPOINT_INFO = "universal_checkpoint_info"
UNIVERSAL_CHECKPOINT_VERSION_KEY = "universal_checkpoint_version"

# A parameter's files in the universal layout
PARAM = "param"
CAT_DIM = "cat_dim"
FP32_WEIGHT_KEY = "fp32"

# File names
MODEL_FILE_PREFIX = "mp_rank_"
ZERO_FILE_PREFIX = "zero_pp_rank_"
FP16_ZERO_FILE_PREFIX = "fp16_" + ZERO_FILE_PREFIX
BF16_ZERO_FILE_PREFIX = "bf16_" + ZERO_FILE_PREFIX
LAYER_FILE_PREFIX = "layer_"
MODEL_FILE_SUFFIX = "_model_states.pt"
OPTIM_FILE_SUFFIX = "_optim_states.pt"
