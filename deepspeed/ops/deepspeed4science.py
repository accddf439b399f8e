"""Kernels for science; the feature is missing (:mod:`deepspeed.missing_features`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
