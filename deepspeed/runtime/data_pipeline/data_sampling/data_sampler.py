"""The sampler of curricula; re-exports; the code is in :mod:`deepspeed.data.curriculum`."""

from __future__ import annotations

from deepspeed.data.curriculum.sampler import DeepSpeedDataSampler

__all__ = ["DeepSpeedDataSampler"]
