"""Tests whether parameters belong to experts, and separate optimizer groups for experts.

ZeRO reads the parameters' marks (``allreduce = False`` and ``group_name``), so separate groups are optional; they exist
for programs that create them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.expert.layer import MoE

_MAX_GROUP_SIZE = 178956971


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Returns whether ``m`` has expert layers of this package, and the number of experts of the first."""
    first = next((module for module in m.modules() if isinstance(module, MoE)), None)
    return (False, 0) if first is None else (True, first.num_experts)


def is_moe_param(param: torch.Tensor) -> bool:
    """Returns whether ``param`` (any shape) belongs to an expert; layers mark those by ``param.allreduce = False``."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(group: dict[str, Any]) -> bool:
    """Returns whether an optimizer's parameter group is one of experts."""
    return bool(group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns ``(parameters that all data-parallel ranks share, parameters of experts)``, of any shape."""
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    return [p for p in listed if not is_moe_param(p)], [p for p in listed if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the gradients of the same two lists, in their own shapes and dtypes, without those that are None."""
    shared, experts = split_params_into_shared_and_expert_params(group)
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: int | None = _MAX_GROUP_SIZE
) -> list[dict[str, Any]]:
    """Gives experts optimizer groups of their own, with the settings of the groups they were in.

    They are taken out of these, in place. Their groups, of at most ``max_group_size`` elements (None: any number), have
    ``moe: True`` and a ``name``, and follow the other ones in what is returned.
    """
    given = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    made: list[dict[str, Any]] = []
    for group in given:
        shared, experts = split_params_into_shared_and_expert_params(group["params"])
        group["params"] = shared
        settings = {key: value for key, value in group.items() if key not in ("params", "name")}
        by_ranks: dict[str, list[torch.Tensor]] = {}
        for parameter in experts:
            by_ranks.setdefault(str(getattr(parameter, "group_name", "ep_size_1")), []).append(parameter)
        for name, members in by_ranks.items():
            for part in _parts(members, max_group_size):
                number = sum(known["name"] == name or known["name"].startswith(f"{name}.") for known in made)
                unique = name if number == 0 else f"{name}.{number}"
                made.append({**settings, "params": part, "name": unique, "moe": True})
    return given + made


def configure_moe_param_groups(model_parameters: Any) -> list[dict[str, Any]]:
    """Returns the same groups for an optimizer's argument: parameters, or groups of them.

    Raises:
        DeepSpeedConfigError: It is neither.
    """
    entries = list(model_parameters)
    if entries and all(isinstance(entry, dict) for entry in entries):
        return split_params_into_different_moe_groups_for_optimizer(entries)
    if not all(isinstance(entry, torch.Tensor) for entry in entries):
        raise DeepSpeedConfigError(
            "configure_moe_param_groups: expected parameters, or dicts with params, and not both; found "
            f"{', '.join(sorted({type(entry).__name__ for entry in entries}))}"
        )
    return split_params_into_different_moe_groups_for_optimizer({"params": entries, "name": "parameters"})


def _parts(parameters: list[torch.Tensor], most: int | None) -> list[list[torch.Tensor]]:
    """Returns the parameters in lists of at most ``most`` elements; one that is larger has a list to itself."""
    parts: list[list[torch.Tensor]] = []
    numel = 0
    for parameter in parameters:
        if not parts or (most is not None and numel + parameter.numel() > most):
            parts.append([])
            numel = 0
        parts[-1].append(parameter)
        numel += parameter.numel()
    return parts
