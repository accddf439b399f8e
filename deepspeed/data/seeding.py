"""Seeds all generators of random numbers."""

from __future__ import annotations

import random

import numpy
import torch


def set_random_seed(seed: int) -> None:
    """Seeds Python, numpy (modulo 2**32) and torch on the host and on all devices, with 0 or more."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # seeds all devices too
