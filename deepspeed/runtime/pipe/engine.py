"""Upstream's import path for names of ``engine.engine`` and ``engine.pipeline``."""

from deepspeed.engine.engine import DeepSpeedEngine as DeepSpeedEngine
from deepspeed.engine.pipeline import DualPipeVEngine as DualPipeVEngine
from deepspeed.engine.pipeline import PipelineEngine as PipelineEngine
