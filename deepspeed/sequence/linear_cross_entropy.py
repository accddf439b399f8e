"""Upstream's import path for names of ``parallel.sequence.vocabulary``."""

from deepspeed.parallel.sequence.vocabulary import (
    vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy,
)
