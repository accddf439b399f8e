"""What must be the same on all ranks for their buckets and collectives to fit, line by line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.engine.optimizers import group_indices
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.address import full_shape


def check_model_alike(
    model: nn.Module, precision: PrecisionPolicy, optimizer: torch.optim.Optimizer | None, group: Any
) -> None:
    """Raises on all ranks of ``group`` if one of them has another model or other param groups. Every rank must call it.

    Args:
        model: The model; sharded parameters count with their full shapes.
        precision: Decides the dtypes that parameters will have.
        optimizer: The torch optimizer, or None.
        group: Torch process group; None: all ranks.
    """
    comm.check_same_model(_model_lines(model, precision, optimizer, group_indices(optimizer)), group)


def _model_lines(
    model: nn.Module,
    precision: PrecisionPolicy,
    optimizer: torch.optim.Optimizer | None,
    group_indices: Mapping[int, int],
) -> list[str]:
    """Describes a model, a line for each parameter and buffer."""
    first_names: dict[int, str] = {}
    lines = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name:
            lines.append(f"{name}: the same parameter as {first}")
            continue
        dtype = str(precision.dtype_for(name, parameter)).removeprefix("torch.")
        trained = "trained" if parameter.requires_grad else "frozen"
        group = group_indices.get(id(parameter))
        member = "in no param group" if group is None else f"in param group {group}"
        lines.append(f"{name}: shape {tuple(full_shape(parameter))}, {dtype}, {trained}, {member}")
    for name, buffer in model.named_buffers():
        lines.append(f"{name}: a buffer of shape {tuple(buffer.shape)}, {str(buffer.dtype).removeprefix('torch.')}")
    lines.append(f"optimizer: {type(optimizer).__name__}")
    return lines
