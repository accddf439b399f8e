"""Names of the package that tests and examples use exist: a renaming finds its tests here, before they are run.

Only what can be seen without running a test is looked at: imports, those inside functions too; attributes of imported
modules and classes; and what ``monkeypatch.setattr(module, "name", ...)`` replaces.
"""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.project.graph import ROOT

# Names that a test expects not to exist.
_ABSENT = {
    ("tests/missing_features/test_table.py", "InferenceEngineV2.no_such_name"),
}


def _resolve(module: str, name: str) -> Any:
    """Returns what ``from module import name`` gives; None where a package that it needs is not installed here.

    Raises:
        AttributeError: There is none.
    """
    try:
        found = importlib.import_module(module)
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
        return getattr(found, name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "deepspeed":
            raise AttributeError(f"{module} has no {name}") from None
        return None


def _assigned(nodes: list[ast.AST]) -> set[str]:
    """Names that mean something else somewhere in a file than what it imports under them."""
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


def _replaced(node: ast.AST) -> tuple[ast.expr, str] | None:
    """The object and the attribute of a call of ``monkeypatch.setattr`` that requires the attribute to exist."""
    match node:
        case ast.Call(ast.Attribute(attr="setattr"), [owner, ast.Constant(str(name)), *_], []):
            return owner, name
    return None


def missing_names(path: Path) -> Iterator[str]:
    """Yields what a test file takes from the package that is not there."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imported: dict[str, Any] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "deepspeed":
            for alias in node.names:
                try:
                    imported[alias.asname or alias.name] = _resolve(str(node.module), alias.name)
                except AttributeError as error:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}: {error}"
    owners = {name: value for name, value in imported.items() if hasattr(value, "__dict__")}
    for name in _assigned(nodes):
        owners.pop(name, None)
    for node in nodes:
        used = (node.value, node.attr) if isinstance(node, ast.Attribute) else _replaced(node)
        if used is None or not isinstance(used[0], ast.Name) or used[0].id not in owners:
            continue
        shown = f"{used[0].id}.{used[1]}"
        if not hasattr(owners[used[0].id], used[1]) and (str(path.relative_to(ROOT)), shown) not in _ABSENT:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: there is no {shown}"


def test_names_that_tests_and_examples_use_exist():
    files = [path for folder in ("tests", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    missing = [line for path in files for line in missing_names(path)]
    assert not missing, "\n".join(missing)


def test_a_missing_name_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.project.test_names_in_tests.ROOT", tmp_path)
    file = tmp_path / "test_it.py"
    file.write_text(
        "from deepspeed import comm, nothing\n"
        "def test(monkeypatch):\n"
        "    from deepspeed.zero.bucket import Bucket\n"
        "    comm.all_reduce, comm.no_such, Bucket.no_such\n"
        '    monkeypatch.setattr(comm, "neither", None)\n'
    )
    lines = {line.rpartition(" ")[2] for line in missing_names(file)}
    assert lines == {"nothing", "comm.no_such", "Bucket.no_such", "comm.neither"}
