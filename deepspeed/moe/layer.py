"""Upstream's import path for names of ``parallel.expert.gate`` and ``parallel.expert.layer``."""

from deepspeed.parallel.expert.gate import TopKGate as TopKGate
from deepspeed.parallel.expert.layer import Experts as Experts
from deepspeed.parallel.expert.layer import MoE as MoE
from deepspeed.parallel.expert.layer import MOELayer as MOELayer
