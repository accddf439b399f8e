"""Upstream's import path for names of ``checkpoint.checkpoint_engine``."""

from deepspeed.checkpoint.checkpoint_engine import TorchCheckpointEngine as TorchCheckpointEngine
