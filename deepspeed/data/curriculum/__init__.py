"""Curriculum learning: trains on easy samples first, or on short ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.data.curriculum.sampler import DeepSpeedDataSampler as DeepSpeedDataSampler
    from deepspeed.data.curriculum.scheduler import CurriculumScheduler as CurriculumScheduler
    from deepspeed.data.curriculum.scheduler import shortened as shortened
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
