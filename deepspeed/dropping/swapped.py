"""Giving a module a further base class in place, so that its name, its parameters and its type stay what they were."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T", bound=nn.Module)


def _made(mixin: Any, kind: Any) -> Any:
    # The name of the module's own class: programs look blocks up by it (``_no_split_modules`` of Transformers).
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (mixin, kind), names)


_joined: Any = cache(_made)


def give_base(module: nn.Module, mixin: type[T]) -> T:
    """Puts ``mixin`` in front of the class of ``module`` and returns the module; a second time changes nothing.

    Wrapping it in another module instead would change the names of its parameters, and a wrapper inside the module
    (a new ``forward``) would come too late: hooks have run by then, and ZeRO has gathered its parameters.
    """
    if not isinstance(module, mixin):
        kind: Any = type(module)
        module.__class__ = _joined(mixin, kind)
    assert isinstance(module, mixin)
    return module
