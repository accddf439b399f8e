"""Models that hold parameters and compute next to nothing, for planning model states alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.memory import META
from deepspeed.plan.models import ModelSource, Workload, without_values


class _Layer(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel, device=META))


class _Layers(nn.Module):
    """One layer of a given size and the rest in layers of at most that size."""

    def __init__(self, total: int, largest: int) -> None:
        super().__init__()
        sizes = [largest] * (total // largest) + ([total % largest] if total % largest else [])
        self.layers = nn.ModuleList(_Layer(size) for size in sizes)


def states_of_layers(total: int, largest: int) -> ModelSource:
    """A model of ``total`` parameters whose largest layer has ``largest``.

    Raises:
        DeepSpeedConfigError: A size is not above 0.
    """
    if total < 1 or largest < 1:
        raise DeepSpeedConfigError(
            f"total_params and largest_layer_params: expected 1 or more of each, found {total} and {largest}"
        )
    return ModelSource(f"{total:,} parameters", lambda: _workload(_Layers(total, min(largest, total))))


def states_of_model(model: nn.Module) -> ModelSource:
    """The parameters and modules of ``model``, without its computation; ``model`` is left alone."""
    return ModelSource(type(model).__name__, lambda: _workload(without_values(model)))


def _workload(model: nn.Module) -> Workload:
    _only_touch_parameters(model, set())

    def inputs(_micro_batch: int, _sequence_length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.zeros((), device=META),), {}

    return Workload(model, inputs)


def _only_touch_parameters(module: nn.Module, seen: set[nn.Module]) -> None:
    """From now on a module's forward adds up its own parameters and calls its children in order."""
    seen.add(module)
    children = [child for child in module.children() if child not in seen]
    for child in children:
        _only_touch_parameters(child, seen)
    module.forward = _touching(module, children)  # type: ignore[method-assign]


def _touching(module: nn.Module, children: list[nn.Module]) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        for parameter in module.parameters(recurse=False):
            x = x + parameter.sum().float()
        for child in children:
            x = child(x)
        return x

    return forward
