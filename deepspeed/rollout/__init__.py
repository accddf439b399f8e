"""Responses of the trained model for reinforcement learning, and losses on them."""

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
    "build_rollout",
]
