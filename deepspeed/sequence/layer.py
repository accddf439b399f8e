"""Upstream's import path for names of ``parallel.sequence.attention``."""

from deepspeed.parallel.sequence.attention import DistributedAttention as DistributedAttention
from deepspeed.parallel.sequence.attention import _SeqAllToAll as _SeqAllToAll
