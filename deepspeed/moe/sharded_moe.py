"""Upstream's import path for names of ``parallel.expert.gate`` and ``parallel.expert.layer``."""

from deepspeed.parallel.expert.gate import TopKGate, top1gating, top2gating, topkgating
from deepspeed.parallel.expert.gate import jittered as multiplicative_jitter
from deepspeed.parallel.expert.layer import MOELayer

__all__ = ["MOELayer", "TopKGate", "multiplicative_jitter", "top1gating", "top2gating", "topkgating"]
