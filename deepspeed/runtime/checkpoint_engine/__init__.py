"""Upstream's import path for names of ``checkpoint.checkpoint_engine``."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.checkpoint.checkpoint_engine import CheckpointCommitInfo as CheckpointCommitInfo
    from deepspeed.checkpoint.checkpoint_engine import CheckpointEngine as CheckpointEngine
    from deepspeed.checkpoint.checkpoint_engine import TorchCheckpointEngine as TorchCheckpointEngine
    from deepspeed.runtime.checkpoint_engine import checkpoint_engine as checkpoint_engine
    from deepspeed.runtime.checkpoint_engine import datastates_checkpoint_engine as datastates_checkpoint_engine
    from deepspeed.runtime.checkpoint_engine import nebula_checkpoint_engine as nebula_checkpoint_engine
    from deepspeed.runtime.checkpoint_engine import torch_checkpoint_engine as torch_checkpoint_engine

lazy_names(__name__)
