"""Questions about partitioned parameters."""

from __future__ import annotations

import torch

from deepspeed.zero.holder import address_of


def is_zero_param(parameter: object) -> bool:
    """Whether ``parameter`` is partitioned (ZeRO stage 3), so that its ``ds_*`` attributes exist."""
    if not isinstance(parameter, torch.Tensor):
        return False
    address = address_of(parameter)
    return address is not None and address.holder.is_partitioned


__all__ = ["is_zero_param"]
