"""Upstream's import path for names of ``dropping.layers``."""

from deepspeed.dropping.layers import ProgressiveLayerDrop as ProgressiveLayerDrop
