"""Seeds all generators of random numbers."""

from __future__ import annotations

import random

import numpy
import torch


def set_random_seed(seed: int) -> None:
    """Seeds Python, numpy and torch on the host and on all devices.

    Args:
        seed: 0 or more; numpy gets it modulo 2**32.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # seeds all devices too
