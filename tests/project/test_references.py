"""What docstrings of the package refer to exists."""

from __future__ import annotations

import importlib
import re
from typing import Any

from tests.project.graph import ROOT

_REFERENCE = re.compile(r":(?:mod|class|func|meth|data|attr|exc):`~?([\w.]+)`")


def _exists(name: str) -> bool:
    """Whether a dotted name is a module, or what is found in one."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        try:
            for attribute in parts[count:]:
                found = getattr(found, attribute)
        except AttributeError:
            return False
        return True
    return False


def test_references_of_docstrings_exist():
    missing = []
    for path in sorted((ROOT / "deepspeed").rglob("*.py")):
        package = ".".join(path.relative_to(ROOT).parent.parts)
        text = path.read_text()
        for match in _REFERENCE.finditer(text):
            name = match[1]
            if name.startswith("."):
                name = package + name
            if name.startswith("deepspeed.") and not _exists(name):
                missing.append(f"{path.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}: {name}")
    assert not missing, "docstrings refer to what is not there:\n" + "\n".join(missing)
