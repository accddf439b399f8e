"""Upstream's import path for names of ``compression.eigenvalue``."""

from deepspeed.compression.eigenvalue import Eigenvalue as Eigenvalue
