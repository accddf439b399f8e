"""What docstrings of the package refer to exists."""

import ast
import importlib
import re
from typing import Any

from tests.project.graph import ROOT, modules, nodes_of, tree_of

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


OF_OTHER_SOFTWARE = {"MMIDIDX", "ncclCommSplit", "pmix_proc_t", "pmix_value_t", "wmem_max"}
OF_FILES_AND_RESULTS = {"combine_weights", "dispatch_mask"}  # what a function returns, by the names of a paper


def _words_of_the_code() -> set[str]:
    """Identifiers and words in texts of the package, docstrings left out, and all words of tests and benchmarks."""
    found: set[str] = set()
    for module in modules():
        docstrings = {id(node.value) for node in nodes_of(module, ast.Expr)}
        for node in nodes_of(module, ast.Constant):
            if isinstance(node.value, str) and id(node) not in docstrings:
                found.update(re.findall(r"\w+", node.value))
        found.update(node.id for node in nodes_of(module, ast.Name))
        found.update(node.attr for node in nodes_of(module, ast.Attribute))
        found.update(node.arg or "" for node in nodes_of(module, ast.arg, ast.keyword))
        for node in nodes_of(module, ast.FunctionDef, ast.ClassDef, ast.alias):
            found.update(node.name.split("."))
        for node in nodes_of(module, ast.ImportFrom):
            found.update((node.module or "").split("."))
        found.update(module.split("."))
    for top in ("tests", "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            found.update(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return found


def test_names_in_docstrings_exist():
    """``a_name`` and ``module.Name``: the last part is somewhere in the code. Names of files may have a prefix."""
    words = _words_of_the_code() | OF_OTHER_SOFTWARE | OF_FILES_AND_RESULTS
    missing = []
    for module in modules():
        for node in (tree_of(module), *nodes_of(module, ast.ClassDef, ast.FunctionDef)):
            for span in re.findall(r"``([A-Za-z_][\w.]*)(?:\([^`]*\))?``", ast.get_docstring(node, clean=False) or ""):
                name = span.rpartition(".")[2]
                if name not in words and name.removeprefix("m") not in words:
                    missing.append(f"{module}: {getattr(node, 'name', 'module')}: {span}")
    assert not missing, "docstrings name what is not there:\n" + "\n".join(missing)


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
