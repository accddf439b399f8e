"""Upstream's import path for names of ``zero.access.parameter_offload``."""

from deepspeed.zero.access.parameter_offload import DeepSpeedZeRoOffload as DeepSpeedZeRoOffload
