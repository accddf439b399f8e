"""What an optimizer of the 1-bit family cannot be combined with."""

from __future__ import annotations

import torch

from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.onebit import ZeroOneAdam
from deepspeed.ops.onebit.phases import mask_of
from deepspeed.zero.placement import Placement, Tier


def refuse_combinations(root: Root, placement: Placement, optimizer: torch.optim.Optimizer) -> None:
    """Raises DeepSpeedConfigError for settings that an optimizer of the 1-bit family cannot be combined with."""
    name = type(optimizer).__name__
    if placement.shard_params:
        raise DeepSpeedConfigError(
            f"optimizer {name} with zero_optimization.stage 3: each rank needs the whole momentum at each step, more "
            "than stage 3 saves; use stage 0, 1 or 2, or another optimizer with communication_compression"
        )
    if placement.shard_master and isinstance(optimizer, ZeroOneAdam):
        raise DeepSpeedConfigError(
            f"optimizer {name} with zero_optimization.stage {placement.stage}: between exchanges each rank moves all "
            "its weights by itself, for which it needs all masters and states; use stage 0, or OneBitAdam"
        )
    if placement.master_tier is not Tier.DEVICE:
        raise DeepSpeedConfigError(
            f"optimizer {name} with zero_optimization.offload_optimizer: its momentum is sent at each step, so it "
            "stays on the device; leave the section out"
        )
    if root.communication_compression.gradients is not None:
        raise DeepSpeedConfigError(
            f"optimizer {name} with communication_compression.gradients: this optimizer exchanges momenta instead of "
            "gradients; leave the key out, or use AdamW with it. For gradients of its warm-up use "
            "communication_compression.warm_up"
        )
    if root.communication_compression.warm_up is not None and isinstance(optimizer, ZeroOneAdam):
        raise DeepSpeedConfigError(
            f"optimizer {name} with communication_compression.warm_up: its variance is updated from exact mean "
            "gradients, and nothing else of gradients travels; leave the key out"
        )
    sparse = root.compression_training.sparse_pruning if root.compression_training is not None else None
    if sparse is not None and sparse.shared_parameters.enabled and sparse.shared_parameters.method == "snip_momentum":
        raise DeepSpeedConfigError(
            f"optimizer {name} with compression_training.sparse_pruning by snip_momentum: gradients differ between "
            "ranks under it, so these would prune different weights; use the method topk, or AdamW"
        )
    if root.communication_compression.islands is not None and isinstance(optimizer, ZeroOneAdam):
        raise DeepSpeedConfigError(
            f"optimizer {name} with communication_compression.islands: ranks of an island would differ when islands "
            "meet, as they take steps of their own; use OneBitAdam on islands, or leave the islands out"
        )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("non_freeze"):
            raise DeepSpeedConfigError(
                f"optimizer {name}: param group {number} has non_freeze, which does not exist here; leave it out"
            )
        for parameter in group["params"] if group.get("exp_avg_mask") is not None else ():
            mask_of(group, parameter.numel(), f"a parameter of param group {number}")
