"""The experts of one rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from deepspeed.zero.access.gathered import GatheredParameters
from deepspeed.zero.address import address_of
from deepspeed.zero.construction.modules import shard_built
from deepspeed.zero.gather.leaf import set_z3_leaf_module

_MARKS = ("tensor_model_parallel", "model_parallel", "partition_dim", "partition_stride")
"""What programs write on parameters that they cut over tensor-parallel ranks."""


class Experts(nn.Module):
    """Copies of one module, each of which sees the tokens that were sent to it.

    All copies begin with equal values. Their parameters say by ``allreduce = False`` and ``group_name`` who shares
    them. At ZeRO stage 3 they are gathered together, as it is not known in advance which will be needed.

    Args:
        expert: The module that is copied; a tensor in, a tensor (or a tuple that begins with one) of equal length out.
        num_local_experts: How many this rank has.
        expert_group_name: Name of the ranks that share them; None: all data-parallel ranks.
    """

    def __init__(self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts
        is_shared_by_all = expert_group_name in (None, "ep_size_1")
        self.deepspeed_experts = nn.ModuleList(
            copy.deepcopy(expert) if is_shared_by_all else _copy(expert) for _ in range(num_local_experts)
        )
        for made in self.deepspeed_experts:
            for old, new in zip(expert.parameters(), made.parameters(), strict=True):
                for mark in _MARKS:  # deepcopy leaves attributes of parameters behind
                    if hasattr(old, mark):
                        setattr(new, mark, getattr(old, mark))
        for parameter in self.deepspeed_experts.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = expert_group_name or "ep_size_1"  # type: ignore[attr-defined]
        set_z3_leaf_module(self, True)

    def forward(self, inputs: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Runs every expert.

        Args:
            inputs: The rows ``[n, M]`` of each expert, of which one without rows is not run; or one tensor whose second
                dimension is that of the experts.

        Returns:
            One result per expert, or a tensor in the form of ``inputs``.
        """
        if isinstance(inputs, torch.Tensor):
            return torch.cat(self._run_each(inputs.chunk(self.num_local_experts, dim=1)), dim=1)
        return self._run_each(inputs)

    def _run_each(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [self._run(*pair) for pair in zip(self.deepspeed_experts, inputs, strict=True)]

    @staticmethod
    def _run(expert: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() == 0:
            return rows
        return first_of(expert(rows))


def first_of(result: Any) -> torch.Tensor:
    """Returns the tensor, where a module may return it with others behind it."""
    found: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return found


def _copy(expert: nn.Module) -> nn.Module:
    """Returns a copy with values of its own, also of a module that ``zero.Init`` has sharded among other ranks."""
    if all(address_of(parameter) is None for parameter in expert.parameters()):
        return copy.deepcopy(expert)
    made = copy.deepcopy(expert)
    with GatheredParameters(list(made.parameters())):
        values = {
            name: nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            for name, parameter in made.named_parameters()
        }
    for name, parameter in values.items():
        place, _, last = name.rpartition(".")
        setattr(made.get_submodule(place), last, parameter)
    shard_built(made)
    return made
