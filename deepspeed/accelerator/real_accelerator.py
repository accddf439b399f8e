"""Upstream's import path for names of ``accelerator.selection``."""

from deepspeed.accelerator.selection import get_accelerator as get_accelerator
from deepspeed.accelerator.selection import is_current_accelerator_supported as is_current_accelerator_supported
from deepspeed.accelerator.selection import set_accelerator as set_accelerator
