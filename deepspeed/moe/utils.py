"""Questions about experts. There are no expert layers yet (:mod:`deepspeed.features`), which answers some of them."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
__all__ += ["has_moe_layers", "is_moe_param", "is_moe_param_group"]


def has_moe_layers(m: torch.nn.Module) -> tuple[bool, int]:
    """Whether ``m`` has expert layers of this package, and the number of experts: (False, 0)."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether ``param`` belongs to an expert, which layers mark by ``param.allreduce = False``."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(group: dict[str, Any]) -> bool:
    """Whether an optimizer's parameter group is one of experts."""
    return bool(group.get("moe", False))
