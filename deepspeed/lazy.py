"""Imports the attributes of modules at first access (PEP 562).

``import deepspeed`` stays fast, and dotted names work: ``deepspeed.runtime.lr_schedules.WarmupLR`` imports the modules
that it needs. A package states its names once, in imports that only type checkers execute::

    if TYPE_CHECKING:
        from deepspeed.schedulers import WarmupLR as WarmupLR

    lazy_names(__name__)

So type checkers and programs that freeze an application see ordinary imports, and no name that does not exist. Names of
missing features (:mod:`deepspeed.missing_features`) are added automatically.
"""

from __future__ import annotations

import dis
import importlib
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

from deepspeed.missing_features import is_missing, missing_names, unavailable

TYPE_CHECKING = False  # type checkers take this name for True, wherever it is from


def stated_imports(code: CodeType) -> dict[str, tuple[str, str]]:
    """Returns the ``from`` imports of a module's top level, executed or not: name -> its module and its name there."""
    found: dict[str, tuple[str, str]] = {}
    module = defined = ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            module = instruction.argval
        elif instruction.opname == "IMPORT_FROM":
            defined = instruction.argval
        elif instruction.opname == "STORE_NAME" and defined:
            found[instruction.argval] = (module, defined)
            defined = ""
    return found


def lazy_names(package: str, others: Sequence[str] = (), **computed: Callable[[], Any]) -> None:
    """Gives its caller, a module, ``__getattr__``, ``__dir__`` and ``__all__`` by the imports that did not run.

    ``__all__`` leaves out submodules that are named as a module of Python or as torch.

    Args:
        others: Names for ``__all__`` that the module has already.
        computed: Functions that compute further names, at each access.
    """
    caller = sys._getframe(1)
    homes = {name: home for name, home in stated_imports(caller.f_code).items() if name not in caller.f_globals}
    names = sorted({*homes, *computed, *missing_names(package)})
    # Not "torch" and "logging" of deepspeed.utils: `from deepspeed.utils import *` would hide the program's own.
    hiding = {"torch", *sys.stdlib_module_names}
    exported = [name for name in names if homes.get(name) != (package, name) or name not in hiding]

    def __getattr__(name: str) -> Any:
        if name in computed:
            return computed[name]()
        if name in homes:
            value = _imported(package, *homes[name])
        elif is_missing(f"{package}.{name}"):
            value = unavailable(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    for name, (home, _) in homes.items():
        if home == f"{package}.{name}":
            # A name and a submodule share this attribute: the import sets it once; afterwards the name is used.
            importlib.import_module(home)
            delattr(sys.modules[package], name)
    caller.f_globals.update(__getattr__=__getattr__, __dir__=__dir__, __all__=[*exported, *others])


def _imported(package: str, home: str, defined: str) -> Any:
    """Returns what ``from home import defined`` imports in ``package``: an attribute or a submodule."""
    if home != package:
        module = importlib.import_module(home)
        if hasattr(module, defined):
            return getattr(module, defined)
    return importlib.import_module(f"{home}.{defined}")
