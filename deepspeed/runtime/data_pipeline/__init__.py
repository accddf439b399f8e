"""Curriculum learning and token dropping; the features are missing (:mod:`deepspeed.features`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__, submodules=["curriculum_scheduler", "data_routing", "data_sampling"]
)
