"""Upstream's import path for names of ``dropping.tokens``."""

from deepspeed.dropping.tokens import RandomLayerTokenDrop as RandomLayerTokenDrop
