"""Drops layers and tokens at random in training."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "ProgressiveLayerDrop": "deepspeed.dropping.layers",
        "RandomLTDScheduler": "deepspeed.dropping.tokens",
        "RandomLayerTokenDrop": "deepspeed.dropping.tokens",
        "convert_to_random_ltd": "deepspeed.dropping.tokens",
        "progressive_layer_drop": "deepspeed.dropping.layers",
    },
)
