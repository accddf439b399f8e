"""Upstream's import path for names of ``git_version_info``."""

from deepspeed.git_version_info import required_torch_version as required_torch_version
