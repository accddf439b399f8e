"""Cutting a batch to a sequence length, for models that do not do so themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def shortened(batch: Any, length: int) -> Any:
    """Returns the first ``length`` positions of every tensor of a batch.

    Args:
        batch: A tensor of shape (samples, positions, ...), or tuples, lists and mappings of such; what has fewer than
            two dimensions, and what is no tensor, stays as it is.
        length: Positions; longer than the batch changes nothing.

    Returns:
        The same structure with contiguous tensors.
    """
    if isinstance(batch, torch.Tensor):
        return batch[:, :length].contiguous() if batch.dim() >= 2 else batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(shortened(part, length) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(shortened(part, length) for part in batch)
    if isinstance(batch, Mapping):
        return {name: shortened(part, length) for name, part in batch.items()}
    return batch
