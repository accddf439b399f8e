"""Curriculum learning and token dropping; re-exports of :mod:`deepspeed.data` and :mod:`deepspeed.dropping`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__, submodules=["curriculum_scheduler", "data_routing", "data_sampling"]
)
