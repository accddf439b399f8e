"""Helpers for saving tensors."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.nested import map_tensors


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Returns a detached copy of ``item`` (nested or not), each tensor with a storage of just its own size.

    ``torch.save`` writes whole storages; a state dict of views into large flat buffers would be written with everything
    that lies beside them. Tied tensors become separate copies.
    """
    return map_tensors(item, lambda tensor: tensor.detach().to(device, copy=True))
