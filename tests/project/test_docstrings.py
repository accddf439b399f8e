"""Docstrings of public functions say the shapes of tensors and their errors, and are no bare references."""

import ast
import builtins
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

from tests.project.graph import modules, nodes_of, tree_of

SHAPES = 0.95  # share of the functions that take tensors and say a shape
RAISES = 0.98  # share of the functions that raise and say so

_TENSOR = re.compile(r"(?<![\w.])(torch\.)?Tensor\b")
_SHAPE = re.compile(r"\[[^\]\n]*\]|\d-D\b|\d-dim\b|\bshape|\b[Ss]calar\b|\bdimension|\bflat\b|\belementwise\b")
_REFERENCE = re.compile(r"^(See the class|As of\b|Likewise\b|As `|As :)")
_FRAGMENT = re.compile(r"(Of|As|By|Whose|Whatever|Likewise|See)\b(?! (default|convention)\b)")
_REFERENCE_OF_ARGUMENT = re.compile(r"^\s*\**\w+: (As of\b|Likewise\b|See there\b|See above\b)")
_OF_THE_PROGRAMMER = {"AssertionError", "NotImplementedError", "StopIteration"}


@dataclass(frozen=True)
class Function:
    """A public function or method, without overrides.

    Attributes:
        node: Its statement.
        place: Module and line.
    """

    node: ast.FunctionDef
    place: str
    owner: ast.ClassDef | None = None

    @cached_property
    def docstring(self) -> str:
        """Its docstring; that of the class for a constructor."""
        return ast.get_docstring(self.owner if self.owner and self.is_constructor else self.node) or ""

    @property
    def is_constructor(self) -> bool:
        return self.node.name == "__init__"

    @property
    def takes_tensors(self) -> bool:
        given = self.node.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        return any(_TENSOR.search(ast.unparse(each.annotation)) for each in arguments if each and each.annotation)

    @property
    def raised(self) -> set[str]:
        """Classes of the errors in its own raise statements."""
        calls = (ast.unparse(each.exc).partition("(")[0] for each in _own(self.node, ast.Raise) if each.exc)
        names = (call.rpartition(".")[2] for call in calls)
        return {name for name in names if name[0].isupper()} - _OF_THE_PROGRAMMER

    @property
    def unnamed(self) -> set[str]:
        """Those of the raised classes that the docstring names neither by themselves nor by a class above them."""
        return {name for name in self.raised if not any(word in self._words for word in _above(name))}

    @cached_property
    def _words(self) -> frozenset[str]:
        return frozenset(re.findall(r"\w+", self.docstring))


@cache
def _bases() -> dict[str, tuple[str, ...]]:
    """Base classes of the package's classes, by name; class names are unique."""
    return {
        node.name: tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
        for module in modules()
        for node in nodes_of(module, ast.ClassDef)
    }


def _above(name: str) -> set[str]:
    """A class of errors and those above it, without Exception."""
    if name in _bases():
        return {name}.union(*map(_above, _bases()[name]))
    known = getattr(builtins, name, None)
    above = {kind.__name__ for kind in known.__mro__} if isinstance(known, type) else {name}
    return above - {"Exception", "BaseException", "object"}


def _own(node: ast.AST, kind: type) -> Iterator:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(child, kind):
            yield child
        yield from _own(child, kind)


@cache
def functions() -> list[Function]:
    """All public functions of the package and methods of public classes."""
    return [found for module in modules() for found in _functions_in(tree_of(module).body, module)]


def _functions_in(body: list[ast.stmt], module: str, owner: ast.ClassDef | None = None) -> Iterator[Function]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        if node.name.startswith("_") and node.name not in ("__init__", "__call__"):
            continue
        if isinstance(node, ast.ClassDef):
            yield from _functions_in(node.body, module, node)
        elif not any(ast.unparse(each).endswith("override") for each in node.decorator_list):
            yield Function(node, f"{module}:{node.lineno} {node.name}", owner)


def _check(documented: list[Function], silent: list[Function], least: float, what: str) -> None:
    share = len(documented) / (len(documented) + len(silent))
    places = "\n".join(each.place for each in silent)
    assert share >= least, f"{share:.3f} of the functions say {what}, {least} did before. These do not:\n{places}"


def test_docstrings_give_shapes():
    taking = [each for each in functions() if each.takes_tensors]
    documented = [each for each in taking if _SHAPE.search(each.docstring)]
    _check(documented, [each for each in taking if each not in documented], SHAPES, "a shape")


def test_docstrings_name_errors():
    raising = [each for each in functions() if each.raised]
    documented = [each for each in raising if not each.unnamed]
    _check(documented, [each for each in raising if each not in documented], RAISES, "which errors they raise")


def test_no_docstring_begins_in_the_middle_of_a_sentence():
    """Of private functions and classes too: ``Of the elements.`` leaves out what it speaks of."""
    found = [
        f"{module}:{node.lineno} {node.name}"
        for module in modules()
        for node in nodes_of(module, ast.ClassDef, ast.FunctionDef)
        if _FRAGMENT.match(ast.get_docstring(node) or "")
    ]
    assert not found, f"say in a whole sentence what these are or do:\n{chr(10).join(found)}"


def test_no_docstring_is_only_a_reference():
    found = [each.place for each in functions() if _REFERENCE.match(each.docstring) and not each.is_constructor]
    assert not found, f"say what these do, or use @override:\n{chr(10).join(found)}"


def test_no_argument_is_explained_by_a_reference_alone():
    found = [
        f"{each.place}: {line.strip()}"
        for each in functions()
        for line in each.docstring.splitlines()
        if _REFERENCE_OF_ARGUMENT.search(line)
    ]
    assert not found, f"say what these arguments are:\n{chr(10).join(found)}"
