"""Gives values to modules that were built on the ``meta`` device, a few modules at a time.

A module on the meta device has shapes and no values. What its constructor would have done is repeated by the methods
that modules have for it: ``reset_parameters`` (or ``_reset_parameters``), then ``_init_weights(module)`` of the nearest
module above it, as model libraries call it. A tensor that neither of them has written is an error that names the
module, since a model that trains from uninitialized memory looks almost right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.layers import initializer_of


class Materializer:
    """Gives values to the parameters and buffers of one model."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._names: dict[nn.Module, str] = {}
        self._above: dict[nn.Module, list[nn.Module]] = {}
        self._owners: dict[int, list[nn.Module]] = {}
        self._children_first = list(_children_first(model, [], set(), self._above))
        for name, module in model.named_modules():
            self._names[module] = name
        self.is_needed = False
        for module in self._children_first:
            for tensor in _own_tensors(module):
                if tensor.device.type == "meta" != device.type:
                    self.is_needed = True
                    self._owners.setdefault(id(tensor), []).append(module)

    def materialize(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Gives values to those of ``params`` that have none, and to the other tensors of their modules."""
        if not self.is_needed:
            return
        needed = {module for p in params if p.device.type == "meta" for module in self._owners.get(id(p), ())}
        self._materialize([module for module in self._children_first if module in needed])

    def finish(self) -> None:
        """Gives values to what is left: buffers of modules without parameters."""
        if self.is_needed:
            left = [m for m in self._children_first if any(t.device.type == "meta" for t in _own_tensors(m))]
            self._materialize(left)

    @torch.no_grad()
    def _materialize(self, modules: list[nn.Module]) -> None:
        made: list[tuple[nn.Module, str, torch.Tensor]] = []
        for module in modules:
            made += self._allocate(module)
        for module in modules:
            self._initialize(module)
        for module, name, tensor in made:
            if _is_unwritten(tensor):
                self._refuse(module, name)

    def _allocate(self, module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
        made: list[tuple[nn.Module, str, torch.Tensor]] = []
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type == "meta":
                fresh = nn.Parameter(_unwritten(parameter, self._device), requires_grad=parameter.requires_grad)
                fresh.__dict__.update(parameter.__dict__)
                fresh.__class__ = type(parameter)
                torch.utils.swap_tensors(parameter, fresh)  # the object stays: optimizers and tied modules hold it
                made.append((module, name, parameter))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                fresh_buffer = _unwritten(buffer, self._device)
                module._buffers[name] = fresh_buffer
                made.append((module, name, fresh_buffer))
        return made

    def _initialize(self, module: nn.Module) -> None:
        for name in ("reset_parameters", "_reset_parameters"):
            method = getattr(module, name, None)
            if callable(method) and _accepts(method, 0):
                method()
                break
        for above in reversed(self._above[module]):
            method = initializer_of(above)
            if method is not None and _accepts(method, 1):
                method(module)
                break

    def _refuse(self, module: nn.Module, name: str) -> None:
        path = self._names.get(module, "")
        raise DeepSpeedConfigError(
            f"initialize: {name!r} of module {path!r} ({type(module).__name__}) is on the meta device, and neither a "
            "reset_parameters() of the module nor an _init_weights(module) above it gave it values. Add "
            "reset_parameters() to the class, build that module on a real device, or build the model under "
            "deepspeed.zero.Init instead"
        )


def _children_first(
    module: nn.Module, above: list[nn.Module], seen: set[nn.Module], found: dict[nn.Module, list[nn.Module]]
) -> Iterator[nn.Module]:
    if module in seen:
        return
    seen.add(module)
    path = [*above, module]
    found[module] = path
    for child in module.children():
        yield from _children_first(child, path, seen, found)
    yield module


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None:
            yield tensor


def _accepts(method: Callable[..., Any], count: int) -> bool:
    """Returns whether a method can be called with ``count`` positional arguments."""
    try:
        inspect.signature(method).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True


def _unwritten(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns memory with a pattern that no initializer leaves behind."""
    made = torch.empty(like.shape, dtype=like.dtype, device=device)
    if made.is_floating_point() or made.is_complex():
        return made.fill_(float("nan"))
    return made if made.dtype == torch.bool else made.fill_(torch.iinfo(made.dtype).max)


def _is_unwritten(tensor: torch.Tensor) -> bool:
    """Returns whether some element still has the pattern (of integers: all of them)."""
    if tensor.numel() == 0 or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.isnan(tensor).any())
    return bool((tensor == torch.iinfo(tensor.dtype).max).all())
