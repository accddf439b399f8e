"""Upstream's import path for names of ``data.curriculum.sampler``."""

from deepspeed.data.curriculum.sampler import DeepSpeedDataSampler as DeepSpeedDataSampler
