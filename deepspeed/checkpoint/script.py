"""Makes ``zero_to_fp32.py``: a script that uses this package where it is installed, and carries its reader otherwise.

The carried part is the source of the modules below, word for word, so that there is only one reader to maintain. They
import nothing but each other, torch and Python itself; a test runs the script without the package.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

SCRIPT_NAME = "zero_to_fp32.py"

CARRIED = (
    "deepspeed.errors",
    "deepspeed.zero.tiling.tiles",
    "deepspeed.zero.tiling.layout",
    "deepspeed.checkpoint.format",
    "deepspeed.checkpoint.directory",
    "deepspeed.checkpoint.disk",
    "deepspeed.checkpoint.source",
    "deepspeed.checkpoint.reader",
    "deepspeed.checkpoint.weights_file",
    "deepspeed.checkpoint.consolidate",
)

_TEMPLATE = '''#!/usr/bin/env python
"""Writes the full weights of a checkpoint in this folder as ordinary files.

    python zero_to_fp32.py . output_folder [--safe_serialization] [--max_shard_size 5GB] [--dtype fp32] [-t TAG]
    python zero_to_fp32.py . pytorch_model.bin

It needs Python, torch and nothing else: no GPU, no configuration. Where deepspeed is installed that is used; otherwise
the sources below, which are deepspeed's own.
"""

import importlib.abc
import importlib.util
import sys

ENTRY = "deepspeed.checkpoint.consolidate"


class Carried(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules whose sources this file carries."""

    def find_spec(self, name, path=None, target=None):
        is_package = any(module.startswith(name + ".") for module in SOURCES)
        if is_package or name in SOURCES:
            return importlib.util.spec_from_loader(name, self, is_package=is_package)
        return None

    def exec_module(self, module):
        source = SOURCES.get(module.__name__, "")
        exec(compile(source, f"<{module.__name__} in {__file__}>", "exec"), module.__dict__)


def load():
    try:
        return importlib.import_module(ENTRY)
    except Exception:  # not installed, another package of that name, or one that does not work here
        for name in [name for name in sys.modules if name == "deepspeed" or name.startswith("deepspeed.")]:
            del sys.modules[name]
        sys.meta_path.insert(0, Carried())
        return importlib.import_module(ENTRY)


SOURCES = {
@SOURCES@}

if __name__ == "__main__":
    sys.exit(load().main())
'''


@cache
def script() -> str:
    """Returns the text of ``zero_to_fp32.py``."""
    parts = []
    for module in CARRIED:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        lines = Path(spec.origin).read_text(encoding="utf-8").splitlines(keepends=True)
        parts.append(f"    {module!r}: (\n" + "".join(f"        {line!r}\n" for line in lines) + "    ),\n")
    return _TEMPLATE.replace("@SOURCES@", "".join(parts))
