"""Progressive layer dropping; re-exports; the code is in :mod:`deepspeed.dropping`."""

from __future__ import annotations

from deepspeed.dropping.theta import ProgressiveLayerDrop

__all__ = ["ProgressiveLayerDrop"]
