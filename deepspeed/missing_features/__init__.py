"""Features that this release does not have: their public names, and their configuration keys.

Programs import names that they may never use. Each such name can be imported. Calling, instantiating or subclassing it
raises :class:`~deepspeed.errors.NotYetSupportedError`; ``isinstance`` against it is False.

:data:`FEATURES` is the only list. The placeholders, the refusals of configurations (``config.unavailable``),
``docs/reference/missing-features.md`` and ``ds_report`` are made from it.
``python -m deepspeed.missing_features [FILE]`` writes the page.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from deepspeed.errors import NotYetSupportedError
from deepspeed.missing_features.table import FEATURES, Feature

_BY_NAME: dict[str, Feature] = {name: feature for feature in FEATURES for name in feature.full_names()}
_MODULES = {name for feature in FEATURES for name in feature.modules.split()}
_placeholders: dict[str, Any] = {}


class _MissingAttributeError(NotYetSupportedError, AttributeError):
    """Raised for an attribute of a placeholder; an AttributeError too, so that ``hasattr`` is False."""


class _MissingClass(ABCMeta):
    """The metaclass of placeholder classes: instantiation, subclassing and attribute access raise an error."""

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **extra: Any) -> Any:
        for base in bases:
            if isinstance(base, _MissingClass):
                raise NotYetSupportedError(base.__doc__)
        return super().__new__(mcs, name, bases, namespace, **extra)

    def __call__(cls, *_args: Any, **_extra: Any) -> Any:
        raise NotYetSupportedError(cls.__doc__)

    def __getattr__(cls, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        raise _MissingAttributeError(cls.__doc__)

    def __repr__(cls) -> str:
        return f"<{cls.__module__}.{cls.__name__}: not supported yet>"


def _missing_function(module: str, name: str, sentence: str) -> Callable[..., Any]:
    def function(*_args: Any, **_extra: Any) -> Any:
        raise NotYetSupportedError(sentence)

    function.__name__ = function.__qualname__ = name
    function.__module__ = module
    function.__doc__ = sentence
    return function


def is_missing(full_name: str) -> bool:
    """Returns whether ``full_name`` belongs to a feature that this release does not have."""
    return full_name in _BY_NAME


def missing_names(module: str) -> list[str]:
    """Returns the names of the placeholders of ``module``, without the module's path."""
    return [name.rpartition(".")[2] for name in _BY_NAME if name.rpartition(".")[0] == module]


def unavailable(full_name: str) -> Any:
    """Returns the placeholder of a missing name: a class for a capital or a module of upstream, otherwise a function.

    Raises:
        KeyError: ``full_name`` is not in :data:`FEATURES`.
    """
    if full_name not in _placeholders:
        sentence = _BY_NAME[full_name].sentence(full_name)
        module, _, name = full_name.rpartition(".")
        if name[0].isupper() or full_name in _MODULES:
            namespace = {"__module__": module, "__doc__": sentence}
            _placeholders[full_name] = _MissingClass(name, (), namespace)
        else:
            _placeholders[full_name] = _missing_function(module, name, sentence)
    return _placeholders[full_name]
