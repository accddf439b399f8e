"""Upstream's import path for names of ``data``."""

from deepspeed.data import DeepSpeedDataLoader as DeepSpeedDataLoader
from deepspeed.data import RepeatingLoader as RepeatingLoader
