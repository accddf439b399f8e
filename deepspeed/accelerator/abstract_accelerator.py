"""Upstream's import path for names of ``accelerator.base``."""

from deepspeed.accelerator.base import DeepSpeedAccelerator as DeepSpeedAccelerator
