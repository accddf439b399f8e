"""Curriculum learning: trains on easy samples first, or on short ones."""

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
