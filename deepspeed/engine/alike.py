"""What must be the same on all ranks for their buckets and collectives to fit, line by line."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.holder import full_shape


def model_lines(
    model: nn.Module,
    precision: PrecisionPolicy,
    optimizer: torch.optim.Optimizer | None,
    group_indices: Mapping[int, int],
) -> list[str]:
    """Describes a model for :func:`deepspeed.comm.check_same_model`.

    Args:
        model: The model; sharded parameters count with their full shapes.
        precision: Decides the dtypes that parameters will have.
        optimizer: The torch optimizer, or None.
        group_indices: ``id(parameter)`` to the number of its param group.
    """
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
