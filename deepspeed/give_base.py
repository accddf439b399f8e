"""Adds a base class to a module in place; its name, its parameters and ``isinstance`` stay the same.

Methods of modules are changed in this way only, so several changes have an order: the last one is called first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from itertools import count
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
    """Makes ``mixin`` the first base class of ``module`` and returns the module; does nothing the second time.

    A wrapper module would change the names of parameters. A ``forward`` set on the object would run after the hooks,
    and two of these would have no order. If the object already has such a ``forward``, the class gets a method that
    calls it, so that the one of ``mixin`` calls it too. It stays an attribute of the object, under another name: a
    copy of the module then has one that is bound to the copy.

    Args:
        mixin: A class whose methods call those of ``super()``. Copies of the module have it too, so its state must be
            attributes of the module that can be copied.
    """
    if not isinstance(module, mixin):
        _insert(module, mixin, _joined)
    assert isinstance(module, mixin)
    return module


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Makes the forward of ``module`` return ``wrapper(module, former, *args, **kwargs)``; its signature stays.

    ``former`` is the forward of before, bound to the module. Copies of the module have the wrapper too, so it should
    use the module that it is given.
    """
    signature = inspect.signature(module.forward)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)

    class WrappedModule(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return wrapper(self, super().forward, *args, **kwargs)

        forward.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])  # type: ignore[attr-defined]

    _insert(module, WrappedModule, _join)


def _insert(module: nn.Module, mixin: Any, join: Callable[[Any, Any], Any]) -> None:
    kind: Any = type(module)
    own = module.__dict__.pop("forward", None)
    if own is not None:
        name = next(found for number in count() if (found := f"_own_forward_{number}") not in module.__dict__)
        module.__dict__[name] = own
        kind = _joined(_calling(name), kind)
    module.__class__ = join(mixin, kind)


@cache
def _calling(name: str) -> Any:
    """Returns a base class whose ``forward`` calls the attribute ``name`` of the object."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return type("OwnForward", (nn.Module,), {"forward": forward})


class PlainAttributes:
    """Speeds up assignments to plain attributes of a module; must precede ``nn.Module`` in the base classes.

    ``nn.Module`` checks every assignment for parameters, buffers and modules, by a dozen calls. For modules that set
    attributes several times per step; an existing plain attribute that stays one is set without these checks.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_plain = not isinstance(value, (torch.Tensor, nn.Module)) or type(value) is torch.Tensor
        if is_plain and name in self.__dict__:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)
