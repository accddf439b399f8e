"""Class names: none occurs twice in the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass

from tests.project.graph import ROOT, modules, path_of, tree_of

# Names that still occur twice. The list only shrinks: a test fails when a name in it has become unique.
DOUBLED: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ClassDef:
    """One class statement of the package.

    Attributes:
        name: Its name.
        bases: The last part of each base class's name.
        place: File and line.
    """

    name: str
    bases: tuple[str, ...]
    place: str


def classes() -> list[ClassDef]:
    """All class statements of the package, those inside functions and classes too."""
    found = []
    for module in modules():
        path = path_of(module).relative_to(ROOT)
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef):
                bases = tuple(ast.unparse(base).rpartition(".")[2] for base in node.bases)
                found.append(ClassDef(node.name, bases, f"{path}:{node.lineno}"))
    return found


def doubled() -> dict[str, list[str]]:
    """Class names that occur twice -> where, leaving out classes that derive from a class of the same name."""
    places = defaultdict(list)
    for each in classes():
        if each.name not in each.bases:
            places[each.name].append(each.place)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_class_names_are_unique():
    new = {name: places for name, places in doubled().items() if name not in DOUBLED}
    assert not new, "put the subject in front of these class names:\n" + "\n".join(
        f"{name}: {', '.join(places)}" for name, places in sorted(new.items())
    )


def test_allow_list_of_doubled_names_has_no_unique_name():
    unique = DOUBLED - doubled().keys()
    assert not unique, f"take them from DOUBLED: {', '.join(sorted(unique))}"
