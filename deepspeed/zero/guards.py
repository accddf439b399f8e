"""Hooks on a model against mistakes of programs: incomplete state dicts, and gradients that no engine uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed.errors import ShardedAccessError
from deepspeed.logging import warn_once
from deepspeed.zero.access.views import mark_module
from deepspeed.zero.address import ShardedParameter, note_placeholders
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.tiling.describe import describe
from deepspeed.zero.tiling.layout import DATA
from deepspeed.zero.tiling.parts import has_part


def guard_state_dicts(model: nn.Module) -> list[RemovableHandle]:
    """Registers hooks on a model with sharded parameters.

    ``state_dict`` logs that it holds placeholders, ``load_state_dict`` raises.
    """
    for module in model.modules():
        mark_module(module)
    handles = [model.register_state_dict_post_hook(_note_placeholders)]
    # On every module, since loaders that gather module by module call load_state_dict of each.
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            handles.append(module.register_load_state_dict_pre_hook(_refuse_loading))
    return handles


def _note_placeholders(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Logs one line where a state dict has placeholders of sharded parameters; also for a nested module."""
    if any(isinstance(value, torch.Tensor) and value.shape == (0,) for value in state.values()):
        note_placeholders("state_dict()")


def guard_parts(model: nn.Module) -> list[RemovableHandle]:
    """Registers a hook on a model that is cut over ranks: ``state_dict`` logs that it holds this rank's part."""
    if not any(has_part(p) and describe(name, p).group != DATA for name, p in model.named_parameters()):
        return []
    return [model.register_state_dict_post_hook(_note_parts)]


def _note_parts(_module: nn.Module, _state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
    warn_once(
        "parts:state_dict()",
        "state_dict(): ranks share layers or experts of this model, so it holds this rank's part of them, and a file "
        "made of it (torch.save, save_pretrained) lacks the other parts. engine.save_16bit_model, "
        "engine.save_checkpoint and engine.iter_full give whole tensors; every rank must call them",
    )


def _refuse_loading(module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    """Raises before torch would report that every shape differs."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, ShardedParameter) and prefix + name in state:
            raise ShardedAccessError(
                f"load_state_dict: {prefix + name!r} and others are sharded (ZeRO stage 3), so there is nothing to "
                "copy into. Use engine.load_checkpoint, or load on rank 0 inside "
                "`with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0)`"
            )


class UntrainedGradients:
    """Drops the gradients of parameters that require one and belong to no group of the optimizer."""

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []  # the hooks that do it
        self._known: set[int] = set()

    def drop_those_of(self, buckets: Iterable[Bucket]) -> list[str]:
        """Registers hooks on such parameters of ``buckets``; returns the names of those that are new."""
        names = []
        for bucket in buckets:
            for parameter, tile in zip(bucket.params, bucket.layout.tiles, strict=True):
                if tile.param_group < 0 and parameter.requires_grad and id(parameter) not in self._known:
                    self._known.add(id(parameter))
                    self.handles.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))
                    names.append(tile.name)
        return names


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
