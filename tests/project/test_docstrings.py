"""Docstrings are whole sentences, and no bare references."""

import ast
import re
from collections.abc import Iterator

from tests.project.graph import modules, nodes_of

_REFERENCE = re.compile(r"^(See the class|As of\b|Likewise\b|As `|As :)")
_FRAGMENT = re.compile(r"(Of|As|By|Whose|Whatever|Likewise|See)\b(?! (default|convention)\b)")
_REFERENCE_OF_ARGUMENT = re.compile(r"^\s*\**\w+: (As of\b|Likewise\b|See there\b|See above\b)")


def _docstrings(*kinds: type) -> Iterator[tuple[str, str]]:
    """Module and line, and the docstring, of all functions or classes of the package."""
    for module in modules():
        for node in nodes_of(module, *kinds):
            yield f"{module}:{node.lineno} {node.name}", ast.get_docstring(node) or ""


def test_no_docstring_begins_in_the_middle_of_a_sentence():
    """``Of the elements.`` leaves out what it speaks of."""
    found = [place for place, text in _docstrings(ast.ClassDef, ast.FunctionDef) if _FRAGMENT.match(text)]
    assert not found, f"say in a whole sentence what these are or do:\n{chr(10).join(found)}"


def test_no_docstring_is_only_a_reference():
    found = [place for place, text in _docstrings(ast.FunctionDef) if _REFERENCE.match(text)]
    assert not found, f"say what these do, or use @override:\n{chr(10).join(found)}"


def test_no_argument_is_explained_by_a_reference_alone():
    found = [
        f"{place}: {line.strip()}"
        for place, text in _docstrings(ast.FunctionDef)
        for line in text.splitlines()
        if _REFERENCE_OF_ARGUMENT.search(line)
    ]
    assert not found, f"say what these arguments are:\n{chr(10).join(found)}"
