"""Curriculum learning: trains on easy samples first, or on short ones."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.data.curriculum.scheduler": "CurriculumScheduler shortened",
        "deepspeed.data.curriculum.sampler": "DeepSpeedDataSampler",
    },
)
