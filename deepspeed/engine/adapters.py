"""Low-rank adapters added to their base weights for as long as a model generates, and taken out again bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def merged(model: nn.Module) -> Iterator[int]:
    """Inside, the adapters of ``model`` are part of the base weights. Weights must be whole.

    Known are PEFT's LoRA layers, and layers with ``lora_right_weight``, ``lora_left_weight``, ``lora_scaling`` and a
    flag ``fuse_lora``, as programs for RLHF have them. A copy of each base weight is kept meanwhile, since taking an
    addition back would round.

    Yields:
        The number of layers that were merged.
    """
    kept: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []
    try:
        with torch.no_grad():
            for module in model.modules():
                weight = _base_of(module)
                if weight is not None:
                    kept.append((module, weight, weight.detach().clone()))
                    _merge(module)
        yield len(kept)
    finally:
        with torch.no_grad():
            for module, weight, values in kept:
                _part(module)
                weight.copy_(values)


def _base_of(module: Any) -> torch.Tensor | None:
    """The weight that a layer's adapter is added to; None for a layer without one, or with one that is merged."""
    if hasattr(module, "lora_right_weight") and hasattr(module, "fuse_lora"):
        return None if module.fuse_lora else module.weight
    if hasattr(module, "lora_A") and callable(getattr(module, "unmerge", None)):
        return None if module.merged or module.disable_adapters else module.get_base_layer().weight
    return None


def _merge(module: Any) -> None:
    if hasattr(module, "fuse_lora"):
        change = module.lora_left_weight.t() @ module.lora_right_weight.t()
        module.weight.add_(change, alpha=module.lora_scaling)
        module.fuse_lora = True
    else:
        module.merge()


def _part(module: Any) -> None:
    if hasattr(module, "fuse_lora"):
        module.fuse_lora = False
    else:
        module.unmerge()
