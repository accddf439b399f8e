"""Upstream's import path for names of ``precision.on_device``."""

from deepspeed.precision.on_device import OnDevice as OnDevice
