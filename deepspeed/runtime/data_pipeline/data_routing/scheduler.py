"""Upstream's import path for names of ``dropping.tokens``."""

from deepspeed.dropping.tokens import RandomLTDScheduler as RandomLTDScheduler
