"""Upstream's import path for names of ``parallel.expert.layer``."""

from deepspeed.parallel.expert.layer import Experts as Experts
