"""Sizes that a reader can hold in mind: no long file, no long function."""

from __future__ import annotations

import ast

from tests.project.graph import ROOT, modules, nodes_of, tree_of

FILE = 600  # lines
FUNCTION = 80  # lines, with its docstring


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


def test_initialize_reads_on_one_screen():
    tree = tree_of("deepspeed.engine.initialize")
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert functions["initialize"].end_lineno - functions["initialize"].lineno < 50
    for function in functions.values():
        assert isinstance(function.body[0], ast.Expr), "the docstring, which does not count here"
        assert function.end_lineno - function.body[0].end_lineno <= 40, f"give a step of {function.name} a function"
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module.startswith("deepspeed")]
    assert len(imports) <= 18, "give a step of initialize that needs more modules a function elsewhere"
