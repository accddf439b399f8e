"""Upstream's import path for names of ``engine.hybrid``."""

from deepspeed.engine.hybrid import HybridEngineRollout as HybridEngineRollout
from deepspeed.engine.hybrid import RolloutBatch as RolloutBatch
from deepspeed.engine.hybrid import RolloutRequest as RolloutRequest
from deepspeed.engine.hybrid import SamplingConfig as SamplingConfig
