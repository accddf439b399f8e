"""Tensors in one flat tensor, and back: what programs load by ``UtilsBuilder().load()``."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the elements of all tensors (any shapes, one dtype), one tensor after another: 1-D, a copy."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Returns views of ``flat`` (1-D), one after another in the shapes of ``tensors``."""
    parts = flat.split([tensor.numel() for tensor in tensors])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
