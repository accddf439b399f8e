"""Methods and attributes of an object that are those of one of its attributes."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import getdoc
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def forwarded(collaborator: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Returns a method with the signature of ``method`` that calls it on an attribute of its object."""

    @wraps(method)
    def forward(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(self, collaborator), *args, **kwargs)

    forward.__doc__ = getdoc(method)  # also that of the method which it overrides
    return forward


def forwarded_attribute(collaborator: str, name: str, meaning: str) -> Any:
    """Returns a property that reads and writes ``name`` of one of its object's attributes."""

    def read(self: Any) -> Any:
        return getattr(getattr(self, collaborator), name)

    def write(self: Any, value: Any) -> None:
        setattr(getattr(self, collaborator), name, value)

    return property(read, write, doc=meaning)
