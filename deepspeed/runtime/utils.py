"""Helpers; re-exports from :mod:`deepspeed.data`, :mod:`.parallel`, :mod:`.precision` and :mod:`.profiling`."""

from __future__ import annotations

from deepspeed.data import move_to_device, set_random_seed
from deepspeed.parallel.partition import partition_balanced, partition_uniform, prefix_sum_inc
from deepspeed.precision.clipping import clip_grad_norm_, get_global_norm
from deepspeed.profiling.memory import see_memory_usage

__all__ = [
    "clip_grad_norm_",
    "get_global_norm",
    "move_to_device",
    "partition_balanced",
    "partition_uniform",
    "prefix_sum_inc",
    "see_memory_usage",
    "set_random_seed",
]
