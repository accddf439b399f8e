"""Upstream's import path for names of ``engine.zero_optimizer``."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.engine.zero_optimizer import DeepSpeedOptimizer as DeepSpeedOptimizer
    from deepspeed.engine.zero_optimizer import ZeROOptimizer as ZeROOptimizer
    from deepspeed.runtime import activation_checkpointing as activation_checkpointing
    from deepspeed.runtime import base_optimizer as base_optimizer
    from deepspeed.runtime import bf16_optimizer as bf16_optimizer
    from deepspeed.runtime import checkpoint_engine as checkpoint_engine
    from deepspeed.runtime import comm as comm
    from deepspeed.runtime import config as config
    from deepspeed.runtime import config_utils as config_utils
    from deepspeed.runtime import constants as constants
    from deepspeed.runtime import data_pipeline as data_pipeline
    from deepspeed.runtime import dataloader as dataloader
    from deepspeed.runtime import domino as domino
    from deepspeed.runtime import eigenvalue as eigenvalue
    from deepspeed.runtime import engine as engine
    from deepspeed.runtime import fp16 as fp16
    from deepspeed.runtime import hybrid_engine as hybrid_engine
    from deepspeed.runtime import lr_schedules as lr_schedules
    from deepspeed.runtime import pipe as pipe
    from deepspeed.runtime import progressive_layer_drop as progressive_layer_drop
    from deepspeed.runtime import rollout as rollout
    from deepspeed.runtime import sequence_parallel as sequence_parallel
    from deepspeed.runtime import sparse_tensor as sparse_tensor
    from deepspeed.runtime import state_dict_factory as state_dict_factory
    from deepspeed.runtime import swap_tensor as swap_tensor
    from deepspeed.runtime import tensor_parallel as tensor_parallel
    from deepspeed.runtime import utils as utils
    from deepspeed.runtime import weight_quantizer as weight_quantizer
    from deepspeed.runtime import zenflow as zenflow
    from deepspeed.runtime import zero as zero

lazy_names(__name__)
