"""Upstream's import path for names of missing features."""

from deepspeed.lazy import lazy_names

lazy_names(__name__)
