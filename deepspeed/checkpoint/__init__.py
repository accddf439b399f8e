"""Saves and loads checkpoints, which any stage, number of ranks and parallel layout can read."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {"deepspeed.checkpoint.deepspeed_checkpoint": "DeepSpeedCheckpoint"},
    submodules="constants utils",
)
