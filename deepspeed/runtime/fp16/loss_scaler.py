"""Loss scalers; re-exports; the code is in :mod:`deepspeed.precision.loss_scaler`."""

from __future__ import annotations

from deepspeed.precision.loss_scaler import (
    CONSECUTIVE_HYSTERESIS,
    DELAYED_SHIFT,
    INITIAL_LOSS_SCALE,
    MIN_LOSS_SCALE,
    SCALE_WINDOW,
    CreateLossScaler,
    DynamicLossScaler,
    LossScaler,
    LossScalerBase,
)

__all__ = [
    "CONSECUTIVE_HYSTERESIS",
    "CreateLossScaler",
    "DELAYED_SHIFT",
    "DynamicLossScaler",
    "INITIAL_LOSS_SCALE",
    "LossScaler",
    "LossScalerBase",
    "MIN_LOSS_SCALE",
    "SCALE_WINDOW",
]
