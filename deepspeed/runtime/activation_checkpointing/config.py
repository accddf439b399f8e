"""Settings of activation checkpointing; re-exports; the code is in :mod:`deepspeed.config`."""

from __future__ import annotations

from deepspeed.config.sections.activation import ActivationCheckpointing as DeepSpeedActivationCheckpointingConfig

__all__ = [
    "DeepSpeedActivationCheckpointingConfig",
]
