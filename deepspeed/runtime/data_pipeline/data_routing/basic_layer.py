"""Random layerwise token dropping; re-exports; the code is in :mod:`deepspeed.dropping`."""

from __future__ import annotations

from deepspeed.dropping.tokens import RandomLayerTokenDrop

__all__ = ["RandomLayerTokenDrop"]
