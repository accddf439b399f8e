"""Re-exports :mod:`deepspeed.missing_features` at the path ``deepspeed.features``, which programs import."""

from __future__ import annotations

from deepspeed.missing_features import FEATURES, Feature, is_missing, missing_names, unavailable

__all__ = ["FEATURES", "Feature", "is_missing", "missing_names", "unavailable"]
