"""Methods and attributes of the engine that a collaborator has."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def forwarded(collaborator: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method that calls ``method`` of one of its object's attributes; signature and documentation are those of it.

    Args:
        collaborator: Name of the attribute.
        method: Of the collaborator's class.
    """

    @wraps(method)
    def forward(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(self, collaborator), *args, **kwargs)

    return forward


def forwarded_attribute(collaborator: str, name: str, meaning: str) -> Any:
    """Returns a property that reads and writes ``name`` of one of its object's attributes.

    Args:
        collaborator: Name of the attribute.
        name: Of the collaborator's attribute.
        meaning: Its documentation.
    """

    def read(self: Any) -> Any:
        return getattr(getattr(self, collaborator), name)

    def write(self: Any, value: Any) -> None:
        setattr(getattr(self, collaborator), name, value)

    return property(read, write, doc=meaning)
