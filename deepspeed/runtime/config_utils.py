"""Upstream's import path for names of ``config.enums``."""

from deepspeed.config.enums import DeepSpeedConfigModel as DeepSpeedConfigModel
from deepspeed.config.enums import get_scalar_param as get_scalar_param
