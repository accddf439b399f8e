"""Adds a base class to a module in place; its name, its parameters and ``isinstance`` stay the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T", bound=nn.Module)


def _join(mixin: Any, kind: Any) -> Any:
    # The name of the module's own class: programs look blocks up by it (``_no_split_modules`` of Transformers).
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (mixin, kind), names)


_joined: Any = cache(_join)


def give_base(module: nn.Module, mixin: type[T]) -> T:
    """Puts ``mixin`` in front of the class of ``module`` and returns the module; a second time changes nothing.

    Wrapping it in another module instead would change the names of its parameters. A new ``forward`` of the object
    would come too late for what must be decided before hooks run, and two of them would have no order. A ``forward``
    that the object has of its own already becomes its class's, so that the one of ``mixin`` calls it.

    Args:
        module: Changed in place.
        mixin: A class whose methods call those of ``super()``. A copy of the module has it too, so it must find what it
            needs by the module, and not in values that cannot be copied.
    """
    if not isinstance(module, mixin):
        own = module.__dict__.pop("forward", None)
        kind: Any = type(module) if own is None else _join(_with_forward(own), type(module))
        module.__class__ = _joined(mixin, kind)
    assert isinstance(module, mixin)
    return module


def _with_forward(own: Callable[..., Any]) -> Any:
    def forward(_self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return type("OwnForward", (nn.Module,), {"forward": forward})


class PlainAttributes:
    """For modules that count and note things in themselves several times in a step; before ``nn.Module`` in the bases.

    ``nn.Module`` looks for parameters, buffers and modules at every assignment, a dozen calls in each. What is a plain
    attribute and stays one is set without.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_plain = not isinstance(value, (torch.Tensor, nn.Module)) or type(value) is torch.Tensor
        if is_plain and name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)
