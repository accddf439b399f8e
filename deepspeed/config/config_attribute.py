"""Attributes of the objects by which programs read a configuration under upstream's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from typing_extensions import Self, override

Values = TypeVar("Values")
Value = TypeVar("Value")


class ConfigAttribute(property, Generic[Value]):
    """A property whose type is known to type checkers, though a lambda reads it; read-only without ``write``."""

    def __init__(
        self, read: Callable[[Any], Value], meaning: str, write: Callable[[Any, Value], None] | None = None
    ) -> None:
        super().__init__(read, write)
        self.__doc__ = meaning  # a subclass of property does not take it from its argument `doc`

    @overload
    def __get__(self, instance: None, kind: type, /) -> Self: ...

    @overload
    def __get__(self, instance: object, kind: type | None = None, /) -> Value: ...

    @override
    def __get__(self, instance: object, kind: type | None = None, /) -> Any:
        return super().__get__(instance, kind)


class AttributeBuilder(Generic[Values]):
    """Makes read-only attributes that read from the same part of a configuration.

    The part is bound before the lambdas are given, because type checkers infer the types of their arguments from it.
    """

    def __init__(self, values_of: Callable[[Any], Values]) -> None:
        self._values_of = values_of

    def __call__(self, read: Callable[[Values], Value], meaning: str) -> ConfigAttribute[Value]:
        """Returns an attribute whose value ``read`` takes from the part and whose docstring is ``meaning``."""
        return ConfigAttribute(lambda instance: read(self._values_of(instance)), meaning)
