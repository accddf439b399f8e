"""Upstream's import path for names of ``rollout``."""

from deepspeed.rollout.base import RolloutBatch as RolloutBatch
from deepspeed.rollout.base import RolloutConfig as RolloutConfig
from deepspeed.rollout.base import RolloutEngine as RolloutEngine
from deepspeed.rollout.base import RolloutRequest as RolloutRequest
from deepspeed.rollout.base import SamplingConfig as SamplingConfig
from deepspeed.rollout.hybrid import HybridEngineRollout as HybridEngineRollout
from deepspeed.rollout.hybrid import build_rollout as build_rollout
