"""The settings of the ZeRO runtime of one model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.zero.gather.schedule import GatherLimits
from deepspeed.zero.gradient.gradient_bucket import ReductionPolicy
from deepspeed.zero.gradient.gradient_sum import GradientDestination
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.storage import Memory, MemoryTracker
from deepspeed.zero.tiling.layout import Limits


@dataclass(frozen=True)
class RuntimeOptions:
    """Holds the settings of the ZeRO runtime, from the configuration.

    Attributes:
        placement: The ZeRO row.
        layout: Sizes that decide which parameters share a bucket.
        gathers: Sizes that decide when buckets are gathered and freed.
        reduction: How gradients are combined; None where nothing is trained.
        granularity: A block of at most this many elements is never split into smaller units.
        compute_dtype: Dtype of a parameter, by name and parameter.
        whole_tensors: The optimizer needs parameters in their shape (allowed where nothing is sharded).
        device: Where the model computes.
        param_memories: Where compute shards are kept, for every tier in use.
        master_memories: Where masters and optimizer states are kept, for every tier in use.
        destination: Makes what brings the reduced gradients of one bucket to their tier.
        serves_branches: Whether ranks may gather different parameters (``zero_optimization.agreement``).
        state_itemsizes: For every per-element optimizer state, as far as it is known beforehand, its bytes per fp32
            element.
    """

    placement: Placement
    layout: Limits
    gathers: GatherLimits
    reduction: ReductionPolicy | None
    granularity: int
    compute_dtype: Callable[[str, torch.Tensor], torch.dtype]
    whole_tensors: bool
    device: torch.device
    param_memories: Mapping[Tier, Memory]
    master_memories: Mapping[Tier, Memory]
    destination: Callable[[Tier, MemoryTracker], GradientDestination]
    serves_branches: bool = False
    state_itemsizes: tuple[int, ...] = ()

    @property
    def host_is_device(self) -> bool:
        """Returns whether the model computes in host memory."""
        return get_accelerator().shares_host_memory(self.device)
