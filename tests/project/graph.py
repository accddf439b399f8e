"""The import graph of the package, read from the sources without importing anything."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "deepspeed"

Node = TypeVar("Node", bound=ast.AST)


@dataclass(frozen=True)
class Import:
    """One import of a module by a module of the package, at its top or inside a function.

    Attributes:
        importer: Dotted name of the module with the statement.
        imported: Dotted name of the module it imports.
        line: Line of the statement.
    """

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{path_of(self.importer).relative_to(ROOT)}:{self.line} imports {self.imported}"


@cache
def modules() -> dict[str, Path]:
    """Returns dotted name -> file, for every module of the package."""
    found: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def path_of(module: str) -> Path:
    return modules()[module]


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text(encoding="utf-8"))


@cache
def _by_type(tree: ast.AST) -> dict[type[ast.AST], list[ast.AST]]:
    found: dict[type[ast.AST], list[ast.AST]] = {}
    for node in ast.walk(tree):
        found.setdefault(type(node), []).append(node)
    return found


def nodes_of(source: str | ast.AST, *types: type[Node]) -> Iterator[Node]:
    """Yields the nodes of these types in a module or a tree, one type after the other.

    Walking through all modules takes seconds, so each is walked through once.
    """
    found = _by_type(tree_of(source) if isinstance(source, str) else source)
    for kind in types:
        yield from found.get(kind, ())  # type: ignore[misc]


@cache
def imports() -> tuple[Import, ...]:
    """Returns all imports in the package, of any module, except those for type checkers only."""
    return tuple(entry for module in modules() for entry in _imports_of(module))


def _imports_of(module: str) -> Iterator[Import]:
    for node in _statements(tree_of(module).body):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = _base(module, node)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                is_module = full in modules() or full == "torch.distributed"
                yield Import(module, full if is_module else base, node.lineno)


def _base(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    is_package = path_of(module).name == "__init__.py"
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join(parts + ([node.module] if node.module else []))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from _statements(node.orelse)
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, name, []))
        for part in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from _statements(part.body)


def edges() -> dict[str, set[str]]:
    """Returns module -> modules of the package that it imports, also inside functions; parent packages included."""
    found: dict[str, set[str]] = {module: set() for module in modules()}
    for entry in imports():
        if entry.imported not in modules():
            continue
        found[entry.importer].add(entry.imported)
        # `import a.b.c` also runs the __init__ of a and a.b, unless the importer lives in them (the root never counts).
        parts = entry.imported.split(".")
        for length in range(2, len(parts)):
            package = ".".join(parts[:length])
            if not (entry.importer + ".").startswith(package + "."):
                found[entry.importer].add(package)
    return found


def cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Returns the import cycles: the strongly connected components of several modules (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1 or node in edges[node]:
                components.append(sorted(component))

    for node in edges:
        if node not in index:
            visit(node)
    return components
