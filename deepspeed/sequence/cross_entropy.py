"""Upstream's import path for names of ``parallel.sequence.vocabulary``."""

from deepspeed.parallel.sequence.vocabulary import VocabParallelCrossEntropyLoss as VocabParallelCrossEntropyLoss
from deepspeed.parallel.sequence.vocabulary import chunked_cross_entropy as chunked_cross_entropy
from deepspeed.parallel.sequence.vocabulary import (
    vocab_sequence_parallel_cross_entropy as vocab_sequence_parallel_cross_entropy,
)
