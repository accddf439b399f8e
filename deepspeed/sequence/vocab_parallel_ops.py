"""Upstream's import path for names of ``parallel.sequence.vocabulary``."""

from deepspeed.parallel.sequence.vocabulary import vocab_parallel_entropy as vocab_parallel_entropy
from deepspeed.parallel.sequence.vocabulary import vocab_parallel_kl_div as vocab_parallel_kl_div
from deepspeed.parallel.sequence.vocabulary import vocab_parallel_logprobs as vocab_parallel_logprobs
