"""Limits for files and functions, wide enough for one that tells a story from its beginning to its end."""

import ast

from tests.project.graph import ROOT, modules, nodes_of

FILE = 900  # lines
FUNCTION = 120  # lines, with its docstring


def test_files_are_short():
    paths = [
        *modules().values(),
        *(path for folder in ("benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")),
    ]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    long = {path: length for path, length in lengths.items() if length > FILE}
    assert not long, f"divide these by what they do: {long}"


def test_functions_are_short():
    long = {
        f"{module}.{node.name}": node.end_lineno - node.lineno + 1
        for module in modules()
        for node in nodes_of(module, ast.FunctionDef, ast.AsyncFunctionDef)
        if node.end_lineno is not None
        if node.end_lineno - node.lineno >= FUNCTION
    }
    assert not long, f"divide these by what they do: {long}"
