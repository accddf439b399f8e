"""Upstream's import path for names of ``engine.hybrid``."""

from deepspeed.engine.hybrid import DeepSpeedHybridEngine as DeepSpeedHybridEngine
