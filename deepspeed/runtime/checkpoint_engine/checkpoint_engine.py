"""Upstream's import path for names of ``checkpoint.checkpoint_engine``."""

from deepspeed.checkpoint.checkpoint_engine import CheckpointCommitInfo as CheckpointCommitInfo
from deepspeed.checkpoint.checkpoint_engine import CheckpointEngine as CheckpointEngine
