"""Curriculum learning: trains on easy samples first, or on short ones."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.data.curriculum.sampler import DeepSpeedDataSampler as DeepSpeedDataSampler
    from deepspeed.data.curriculum.scheduler import CurriculumScheduler as CurriculumScheduler
    from deepspeed.data.curriculum.scheduler import shortened as shortened

lazy_names(__name__)
