"""The optimizer LAMB (You and others, 2019), whose step sizes follow the norms of tensors, also of sharded ones."""

from deepspeed.ops.lamb.fused_lamb import FusedLamb

__all__ = ["FusedLamb"]
