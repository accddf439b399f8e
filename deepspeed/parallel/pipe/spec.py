"""Descriptions of layers, from which only their stage builds the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.zero.address import full_numel
from deepspeed.zero.construction.modules import suspended


class LayerSpec:
    """A layer that is built where it is needed, from its class and arguments.

    Raises:
        DeepSpeedConfigError: ``typename`` is no class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise DeepSpeedConfigError(
                f"{type(self).__name__}: expected a class derived from torch.nn.Module, found {typename!r}; give "
                "functions and modules that exist already to PipelineModule as they are"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs
        self.global_rank: int | None = None  # none; programs set it

    def __repr__(self) -> str:
        words = [repr(value) for value in self.module_args]
        words += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(words)})"

    def build(self, log: bool = False) -> nn.Module:
        """Builds the layer; with ``log`` it is logged, on every rank that builds it."""
        if log:
            log_dist(f"building {self!r}", ranks=[-1])
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer whose weights are equal in all places with the same key, also on different stages.

    Each stage has one module per key, whatever the number of places. Gradients are summed over the stages before the
    update. ``forward_fn(module, x)`` stands for ``module(x)``. ``tied_weight_attr`` are the parameters that are tied,
    by attribute name, which may be dotted; the others are each stage's own.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


def parameter_at(module: nn.Module, path: str) -> nn.Parameter:
    """Returns the parameter that a dotted attribute path or a property leads to.

    Raises:
        DeepSpeedConfigError: It leads to something else, or nowhere.
    """
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, nn.Parameter):
        raise DeepSpeedConfigError(
            f"TiedLayerSpec(tied_weight_attr={path!r}): {type(module).__name__} has no parameter there, found "
            f"{type(found).__name__}; its parameters are {', '.join(name for name, _ in module.named_parameters())}"
        )
    return found


def built_on_meta(spec: LayerSpec) -> nn.Module | None:
    """Returns the layer on the meta device; None if its class cannot be built there."""
    state = torch.random.get_rng_state()
    try:
        with torch.device("meta"):
            return spec.build()
    except (NotImplementedError, RuntimeError, AssertionError):
        return None
    finally:
        torch.random.set_rng_state(state)


Entry = nn.Module | LayerSpec | Callable[..., Any]


def checked(layers: Sequence[Any]) -> list[Entry]:
    """Checks the entries and returns them as a list.

    Raises:
        DeepSpeedConfigError: An entry is not a layer, or there are none.
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
        raise DeepSpeedConfigError("PipelineModule: there are no layers; give at least one")
    return entries


def class_name(entry: Entry) -> str:
    """Returns the name of the layer's class or function."""
    if isinstance(entry, LayerSpec):
        return entry.typename.__name__
    return type(entry).__name__ if isinstance(entry, nn.Module) else getattr(entry, "__name__", type(entry).__name__)


def trainable_numel(entry: Entry) -> int:
    """Returns the trainable elements of a layer.

    Builds a spec without memory if its class allows that, else temporarily.
    """
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
    """Seeds random numbers with ``seed`` inside the context, and restores their states afterwards.

    A ``seed_fn`` of the program seeds them for good.
    """
    if seed_fn is not None:
        seed_fn(seed)
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def check_tie(entry: TiedLayerSpec, module: nn.Module) -> None:
    """Raises unless the module has the parameters that its tie names."""
    for path in entry.tied_weight_attr:
        parameter_at(module, path)
