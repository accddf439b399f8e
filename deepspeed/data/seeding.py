"""Seeds all generators of random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

LOADER_SEED = 1234
"""Seed of the engine's loader in deterministic runs."""


def set_random_seed(seed: int) -> None:
    """Seeds Python, numpy (modulo 2**32) and torch on the host and on all devices, with 0 or more."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # seeds all devices too


@contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Seeds Python, numpy and torch on the host by numbers of 0 or more, and restores their states at the end."""
    python, own = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        seed = int(numpy.random.SeedSequence(numbers).generate_state(1)[0])
        random.seed(seed)
        numpy.random.seed(seed)
        torch.random.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(own)
