"""One seed for every source of random numbers."""

from __future__ import annotations

import random

import numpy
import torch


def set_random_seed(seed: int) -> None:
    """Seeds Python, numpy and torch on the host and on all devices.

    Args:
        seed: At least 0; numpy takes it modulo 2**32.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # every device too
