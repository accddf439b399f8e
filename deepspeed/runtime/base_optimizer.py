"""Base classes of engine optimizers; re-exports; the code is in :mod:`deepspeed.zero.base_optimizer`."""

from __future__ import annotations

from deepspeed.zero.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer

__all__ = [
    "DeepSpeedOptimizer",
    "ZeROOptimizer",
]
