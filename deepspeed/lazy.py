"""Imports the attributes of modules at first access (PEP 562).

``import deepspeed`` stays fast, and dotted names work: ``deepspeed.runtime.lr_schedules.WarmupLR`` imports the modules
that it needs. A package states its names once::

    __getattr__, __dir__, __all__ = lazy_names(__name__, {"WarmupLR": "deepspeed.schedulers"}, submodules=["engine"])

Names of missing features (:mod:`deepspeed.missing_features`) are added automatically.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deepspeed.missing_features import is_missing, missing_names, unavailable


def lazy_names(
    package: str, sources: Mapping[str, str] | None = None, *, submodules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns the ``__getattr__``, ``__dir__`` and ``__all__`` of a module.

    ``__all__`` leaves out submodules that are named as a module of Python or as torch.

    Args:
        package: The module's ``__name__``.
        sources: The module that defines each public name, or ``module:name`` if its name there differs; ``module:``
            is the module itself.
        submodules: Names of the module's submodules.
    """
    sources = dict(sources or {})
    submodules = frozenset(submodules)
    names = sorted({*sources, *submodules, *missing_names(package)})
    # Not "torch" and "logging" of deepspeed.utils: `from deepspeed.utils import *` would hide the program's own.
    exported = [name for name in names if name not in submodules or name not in {"torch", *sys.stdlib_module_names}]

    def find(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name in sources:
            module_name, colon, other = sources[name].partition(":")
            module = importlib.import_module(module_name)
            return module if colon and not other else getattr(module, other or name)
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
