"""Responses of the trained model for reinforcement learning, and losses on them."""

from deepspeed.checkpoint.weight_delta import apply_delta
from deepspeed.rollout.base import (
    RolloutBatch,
    RolloutConfig,
    RolloutEngine,
    RolloutRequest,
    SamplingConfig,
)
from deepspeed.rollout.hybrid import HybridEngineRollout, build_rollout
from deepspeed.rollout.server_client import ServerClient

__all__ = [
    "HybridEngineRollout",
    "RolloutBatch",
    "RolloutConfig",
    "RolloutEngine",
    "RolloutRequest",
    "SamplingConfig",
    "ServerClient",
    "apply_delta",
    "build_rollout",
]
