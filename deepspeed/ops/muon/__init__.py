"""The optimizer Muon, which orthogonalizes the update of each matrix, also where it is sharded."""

from deepspeed.ops.muon.flags import set_optimizer_flags
from deepspeed.ops.muon.muon import Muon

__all__ = ["Muon", "set_optimizer_flags"]
