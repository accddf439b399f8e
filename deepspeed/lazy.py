"""Imports the attributes of modules at first access (PEP 562).

``import deepspeed`` stays fast, and dotted names work: ``deepspeed.runtime.lr_schedules.WarmupLR`` imports the modules
that it needs. A package states its names once::

    __getattr__, __dir__, __all__ = lazy_names(__name__, {"deepspeed.schedulers": "WarmupLR"}, submodules="engine")

Names of missing features (:mod:`deepspeed.missing_features`) are added automatically.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.missing_features import is_missing, missing_names, unavailable


def homes_of(table: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Returns, by public name, the module that defines it and its name there; empty: it is the module itself.

    Args:
        table: See :func:`lazy_names`.
    """
    entries = ((module, name.partition("=")) for module, names in table.items() for name in names.split())
    return {name: (module, defined if equals else name) for module, (name, equals, defined) in entries}


def lazy_names(
    package: str, table: Mapping[str, str] | None = None, *, submodules: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns the ``__getattr__``, ``__dir__`` and ``__all__`` of a module.

    ``__all__`` leaves out submodules that are named as a module of Python or as torch.

    Args:
        package: The module's ``__name__``.
        table: By defining module, the public names, separated by spaces: ``public=defined`` if the two differ, and
            ``public=`` for the module itself.
        submodules: Names of the module's submodules, separated by spaces.
    """
    homes = homes_of(table or {})
    below = frozenset(submodules.split())
    names = sorted({*homes, *below, *missing_names(package)})
    # Not "torch" and "logging" of deepspeed.utils: `from deepspeed.utils import *` would hide the program's own.
    exported = [name for name in names if name not in below or name not in {"torch", *sys.stdlib_module_names}]

    def find(name: str) -> Any:
        if name in below:
            return importlib.import_module(f"{package}.{name}")
        if name in homes:
            home, defined = homes[name]
            module = importlib.import_module(home)
            return getattr(module, defined) if defined else module
        if is_missing(f"{package}.{name}"):
            return unavailable(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def __getattr__(name: str) -> Any:
        value = find(name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return __getattr__, __dir__, exported
