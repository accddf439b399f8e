"""Exceptions; re-exports; the code is in :mod:`deepspeed.errors`."""

from __future__ import annotations

from deepspeed.errors import (
    CallOrderError,
    CheckpointError,
    CommunicationError,
    DeepSpeedConfigError,
    DeepSpeedError,
    DeprecatedException,
    DivergenceError,
    NonFiniteError,
    NotYetSupportedError,
    ShardedAccessError,
)

__all__ = [
    "CallOrderError",
    "CheckpointError",
    "CommunicationError",
    "DeepSpeedConfigError",
    "DeepSpeedError",
    "DeprecatedException",
    "DivergenceError",
    "NonFiniteError",
    "NotYetSupportedError",
    "ShardedAccessError",
]
