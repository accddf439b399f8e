"""Patches and private names of other libraries stand in ``docs/design/other-libraries.md``, with reasons that hold."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import cache

import pytest
import torch

from tests.project import graph

PAGE = graph.ROOT / "docs" / "design" / "other-libraries.md"
LIBRARIES = frozenset({"torch", "transformers", "accelerate"})
NO_PATCH = ("torch.utils._python_dispatch.*",)
"""Extension points, as the page says."""

BY_TEXT = {
    "deepspeed.models.construction": ("transformers", "setattr(kind, name, wrap"),
    "deepspeed.models.loading": ("transformers", "kind._load_pretrained_model = staticmethod(serve)"),
    "deepspeed.parallel.sequence.batches": ("accelerate", "setattr(module, _NAME, skip_first_batches)"),
    "deepspeed.accelerator.cpu": ("mallopt", "library.mallopt"),
}
"""Patches that no assignment to a name of the library shows, and the line that makes each."""


@cache
def _rows() -> dict[str, tuple[str, ...]]:
    """Module -> the names that the page gives for it."""
    rows: dict[str, tuple[str, ...]] = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[0].startswith("`deepspeed"):
            module = cells[0].strip("`").removesuffix(".__init__")
            rows[module] = (*rows.get(module, ()), *re.findall(r"`([^`]+)`", cells[1]))
            assert cells[2], f"{PAGE.name}: {module} has no reason"
    return rows


def _dotted(node: ast.AST) -> list[str]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def _library_names(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name, for what a module imports from the libraries."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                found[one.asname or one.name.partition(".")[0]] = one.name if one.asname else one.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({one.asname or one.name: f"{node.module}.{one.name}" for one in node.names})
    return {name: target for name, target in found.items() if target.partition(".")[0] in LIBRARIES}


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yields what a statement assigns to."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        yield node.target
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "Patch"):
        yield from node.args[:1]


def _found_in(module: str) -> Iterator[str]:
    """Yields the patches and private names in a module, as the page spells them."""
    tree = graph.tree_of(module)
    names = _library_names(tree)

    def full(node: ast.AST) -> str:
        parts = _dotted(node)
        return ".".join([names[parts[0]], *parts[1:]]) if parts and parts[0] in names else ""

    private = [full(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)] + list(names.values())
    for name in private:
        parts = name.split(".")
        is_private = any(part.startswith("_") and not part.startswith("__") for part in parts)
        is_whole = not any(other.startswith(f"{name}.") for other in private)
        if is_private and is_whole and not any(fnmatchcase(name, pattern) for pattern in NO_PATCH):
            yield name
    for node in ast.walk(tree):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and target.attr in ("forward", "__class__"):
                yield target.attr
            elif name := full(target):
                yield name
    if module in BY_TEXT:
        name, line = BY_TEXT[module]
        assert line in graph.path_of(module).read_text(encoding="utf-8"), f"{module} has no line {line!r} any more"
        yield name


def test_every_patch_and_private_name_has_a_reason():
    missing = [
        f"{module}: {name}"
        for module in graph.modules()
        for name in set(_found_in(module))
        if not any(fnmatchcase(name, pattern) for pattern in _rows().get(module, ()))
    ]
    assert not missing, f"ask for a public way, or give the reason in {PAGE.name}:\n" + "\n".join(sorted(missing))


def test_the_page_names_nothing_that_is_gone():
    gone = [
        f"{module}: {pattern}"
        for module, patterns in _rows().items()
        for pattern in patterns
        if module not in graph.modules() or not any(fnmatchcase(name, pattern) for name in _found_in(module))
    ]
    assert not gone, f"take out of {PAGE.name}:\n" + "\n".join(gone)


def _has_public(owner: object, *words: str) -> bool:
    names = [name for name in dir(owner) if not name.startswith("_")]
    return any(all(word in name.lower() for word in words) for name in names)


STILL_NEEDED: dict[str, Callable[[], bool]] = {
    "a storage says how many owners it has": lambda: _has_public(torch.UntypedStorage, "use", "count"),
    "autograd says whether a backward runs": lambda: _has_public(torch.autograd.graph, "task"),
    "autograd calls back at the end of a backward": lambda: _has_public(torch.autograd.graph, "callback"),
    "saved-tensor hooks can be read or put below others": lambda: _has_public(torch.autograd.graph, "saved", "stack"),
    "a module calls back when its constructor ends": lambda: _has_public(torch.nn.Module, "init", "hook"),
    "the default store of a job can be had": lambda: _has_public(torch.distributed, "default_store"),
    "packed products have public names": lambda: _has_public(torch, "int4pack") or _has_public(torch, "int8pack"),
    "fused updates have public names": lambda: _has_public(torch.optim, "fused_adam"),
    "attention returns its log-sum-exp": lambda: _has_public(torch.nn.functional, "attention", "lse"),
}
"""What would make a row needless -> whether the installed torch has it."""


@pytest.mark.parametrize("reason", STILL_NEEDED)
def test_torch_still_has_no_public_way(reason):
    assert not STILL_NEEDED[reason](), f"torch {torch.__version__}: {reason}; take it, and the row out of {PAGE.name}"
