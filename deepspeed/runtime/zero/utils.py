"""Upstream's import path for names of ``zero.address``."""

from deepspeed.zero.address import is_zero_param as is_zero_param
