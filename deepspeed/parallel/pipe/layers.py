"""The row of layers of a pipeline: what is known of each without building it, and building it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.pipe.spec import LayerSpec, TiedLayerSpec, built_on_meta, parameter_at
from deepspeed.zero.address import full_numel
from deepspeed.zero.construction.modules import suspended

Entry = nn.Module | LayerSpec | Callable[..., Any]


def checked(layers: Sequence[Any]) -> list[Entry]:
    """Returns the entries as a list.

    Raises:
        DeepSpeedConfigError: One is not a layer.
    """
    entries = list(layers)
    for number, entry in enumerate(entries):
        if getattr(entry, "is_pipeline", False):
            raise DeepSpeedConfigError(f"PipelineModule: layer {number} is a PipelineModule itself; give its layers")
        if not isinstance(entry, LayerSpec) and not callable(entry):
            raise DeepSpeedConfigError(
                f"PipelineModule: layer {number} is a {type(entry).__name__}; expected a torch.nn.Module, a LayerSpec, "
                "a TiedLayerSpec or a function"
            )
    if not entries:
        raise DeepSpeedConfigError("PipelineModule: there are no layers")
    return entries


def class_name(entry: Entry) -> str:
    """Name of the layer's class or function."""
    if isinstance(entry, LayerSpec):
        return entry.typename.__name__
    return type(entry).__name__ if isinstance(entry, nn.Module) else getattr(entry, "__name__", type(entry).__name__)


def trainable_numel(entry: Entry) -> int:
    """Trainable elements of a layer. A spec is built without memory where its class allows that, else for a moment."""
    if isinstance(entry, LayerSpec):
        with suspended(), torch.random.fork_rng(devices=[]):
            module: Any = built_on_meta(entry) or entry.build()
    else:
        module = entry
    if not isinstance(module, nn.Module):
        return 0
    return sum(full_numel(parameter) for parameter in module.parameters() if parameter.requires_grad)


def tied_places(entries: Sequence[Entry]) -> dict[str, list[int]]:
    """Returns the layers of every tie, by key, in the order of keys."""
    places: dict[str, list[int]] = {}
    for number, entry in enumerate(entries):
        if isinstance(entry, TiedLayerSpec):
            places.setdefault(entry.key, []).append(number)
    return dict(sorted(places.items()))


@contextmanager
def seeded(seed: int, seed_fn: Callable[[int], Any] | None) -> Iterator[None]:
    """Inside, random numbers begin at ``seed``; outside nothing has happened.

    Args:
        seed: The seed.
        seed_fn: Sets it; None: torch's own.
    """
    if seed_fn is not None:
        seed_fn(seed)
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def check_tie(entry: TiedLayerSpec, module: nn.Module) -> None:
    """Raises unless the module has what its tie names."""
    for path in entry.tied_weight_attr:
        parameter_at(module, path)
