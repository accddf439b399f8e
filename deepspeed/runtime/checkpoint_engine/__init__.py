"""Pluggable checkpoint engines; the feature is missing (:mod:`deepspeed.features`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "CheckpointEngine": "deepspeed.runtime.checkpoint_engine.checkpoint_engine",
        "TorchCheckpointEngine": "deepspeed.runtime.checkpoint_engine.checkpoint_engine",
    },
    submodules=["checkpoint_engine"],
)
