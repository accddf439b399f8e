"""Helpers for saving tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Copies the tensors in ``item`` so that each owns a storage of just its own size.

    ``torch.save`` writes whole storages; a state dict of views into large flat buffers would be written with everything
    that lies beside them. Tied tensors become separate copies.

    Args:
        item: A tensor, or lists, tuples and mappings of such; other things pass through.
        device: Where the copies go.

    Returns:
        The same structure with detached copies.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(clone_tensors_for_torch_save(part, device) for part in item))
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(part, device) for part in item)
    if isinstance(item, Mapping):
        copies = {name: clone_tensors_for_torch_save(part, device) for name, part in item.items()}
        return copies if type(item) is dict else type(item)(copies)  # type: ignore[call-arg]
    return item
