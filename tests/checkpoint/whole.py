"""Whole parameters of a checkpoint, for tests that look into one."""

import torch

from deepspeed.checkpoint.format import COMPUTE, MASTER
from deepspeed.checkpoint.source import CheckpointSource, Wanted


def read_whole(source: CheckpointSource, name: str) -> torch.Tensor:
    """The parameter ``name`` in its shape: its master if that was saved, else its compute values."""
    parameter = source.parameters[name]
    kind = next(kind for kind in (MASTER, COMPUTE) if kind in parameter.kinds)
    out = torch.empty(parameter.numel, dtype=parameter.kinds[kind])
    source.read(Wanted(kind, name, 0, parameter.numel), out)
    return out.view(parameter.shape)
