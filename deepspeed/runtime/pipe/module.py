"""Upstream's import path for names of ``errors`` and ``pipe``."""

from deepspeed.errors import PipelineError as PipelineError
from deepspeed.pipe import DualPipeVModule as DualPipeVModule
from deepspeed.pipe import LayerSpec as LayerSpec
from deepspeed.pipe import PipelineModule as PipelineModule
from deepspeed.pipe import TiedLayerSpec as TiedLayerSpec
