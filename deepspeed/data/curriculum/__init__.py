"""Curriculum learning: easy samples, or short ones, first."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "CurriculumScheduler": "deepspeed.data.curriculum.scheduler",
        "DeepSpeedDataSampler": "deepspeed.data.curriculum.sampler",
        "shortened": "deepspeed.data.curriculum.scheduler",
    },
)
