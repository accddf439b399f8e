"""Muon."""

from deepspeed.ops.muon.flags import set_optimizer_flags
from deepspeed.ops.muon.muon import Muon

__all__ = ["Muon", "set_optimizer_flags"]
