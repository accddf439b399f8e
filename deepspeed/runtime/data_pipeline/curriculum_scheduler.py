"""Upstream's import path for names of ``data.curriculum.scheduler``."""

from deepspeed.data.curriculum.scheduler import CurriculumScheduler as CurriculumScheduler
