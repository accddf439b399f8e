"""Drops layers and tokens at random in training."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.dropping.layers": "ProgressiveLayerDrop progressive_layer_drop",
        "deepspeed.dropping.tokens": "RandomLTDScheduler RandomLayerTokenDrop convert_to_random_ltd",
    },
)
