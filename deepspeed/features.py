"""The known path of the list of missing features (:mod:`deepspeed.missing_features`)."""

from __future__ import annotations

from deepspeed.missing_features import FEATURES, Feature, is_missing, missing_names, unavailable

__all__ = ["FEATURES", "Feature", "is_missing", "missing_names", "unavailable"]
