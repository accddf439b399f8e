"""The import paths that the ecosystem uses; re-exports only."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {"DeepSpeedOptimizer": "deepspeed.zero.base_optimizer", "ZeROOptimizer": "deepspeed.zero.base_optimizer"},
    submodules=[
        "activation_checkpointing",
        "base_optimizer",
        "bf16_optimizer",
        "checkpoint_engine",
        "config",
        "config_utils",
        "constants",
        "data_pipeline",
        "dataloader",
        "engine",
        "fp16",
        "hybrid_engine",
        "lr_schedules",
        "pipe",
        "progressive_layer_drop",
        "rollout",
        "sequence_parallel",
        "tensor_parallel",
        "utils",
        "zero",
    ],
)
