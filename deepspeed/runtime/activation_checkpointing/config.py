"""Upstream's import path for names of ``config.sections.root``."""

from deepspeed.config.sections.root import ActivationCheckpointing as DeepSpeedActivationCheckpointingConfig

__all__ = ["DeepSpeedActivationCheckpointingConfig"]
