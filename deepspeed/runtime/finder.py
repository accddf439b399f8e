"""Makes the modules of :mod:`deepspeed.runtime.paths` when they are imported.

Each is an ordinary module in ``sys.modules`` whose names are looked up when first asked for (:mod:`deepspeed.lazy`), so
``import``, attribute walks, pickles and replaced attributes work as with files.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from deepspeed.lazy import lazy_names
from deepspeed.runtime.paths import MODULES, PATHS

ROOT = "deepspeed.runtime"


def children_of(path: str) -> list[str]:
    """Returns the names of the modules right below a path of the table; ``""`` is ``deepspeed.runtime`` itself."""
    prefix = f"{path}." if path else ""
    below = [name.removeprefix(prefix) for name in (*PATHS, *MODULES) if name.startswith(prefix)]
    return sorted(name for name in below if "." not in name)


def install() -> None:
    """Adds the finder behind all others, so that imports of files cost nothing more. May be called again."""
    if not any(isinstance(finder, KnownPathFinder) for finder in sys.meta_path):
        sys.meta_path.append(KnownPathFinder())


class KnownPathFinder(MetaPathFinder, Loader):
    """Finds and loads the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module of the table, None for any other."""
        inner = _path_of(fullname)
        if inner not in PATHS and inner not in MODULES:
            return None
        return ModuleSpec(fullname, self, origin=f"the table of {ROOT}.paths", is_package=bool(children_of(inner)))

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns None: an ordinary module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its names, or puts another one in its place where the path stands for a whole module."""
        inner = _path_of(module.__name__)
        if inner in MODULES:
            sys.modules[module.__name__] = importlib.import_module(MODULES[inner])
            return
        homes = {
            new: f"{home}:{old or new}"
            for home, names in PATHS[inner].items()
            for new, _, old in (name.partition("=") for name in names.split())
        }
        listed = ", ".join(f":mod:`{home}`" for home in PATHS[inner]) or "the modules below"
        module.__doc__ = f"Re-exports from {listed}; made from the table of :mod:`{ROOT}.paths`."
        find, listing, names = lazy_names(module.__name__, homes, submodules=children_of(inner))
        module.__dict__.update(__getattr__=find, __dir__=listing, __all__=names)


def _path_of(fullname: str) -> str:
    return fullname.removeprefix(f"{ROOT}.") if fullname.startswith(f"{ROOT}.") else ""
