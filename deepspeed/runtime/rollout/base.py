"""Upstream's import path for names of ``rollout.base``."""

from deepspeed.rollout.base import RolloutBatch as RolloutBatch
from deepspeed.rollout.base import RolloutConfig as RolloutConfig
from deepspeed.rollout.base import RolloutEngine as RolloutEngine
from deepspeed.rollout.base import RolloutRequest as RolloutRequest
from deepspeed.rollout.base import SamplingConfig as SamplingConfig
