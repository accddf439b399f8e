"""Upstream's import path for names of 4 modules."""

from deepspeed.parallel.pipe.module import DualPipeVModule as DualPipeVModule
from deepspeed.parallel.pipe.module import PipelineModule as PipelineModule
from deepspeed.parallel.pipe.spec import LayerSpec as LayerSpec
from deepspeed.parallel.pipe.spec import TiedLayerSpec as TiedLayerSpec
from deepspeed.parallel.pipe.stage_layers import add_loss as add_loss
from deepspeed.parallel.pipe.transformers_models import transformers_state_dict as transformers_state_dict
