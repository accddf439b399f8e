"""Class names: none occurs twice in the package, and the last word of each is known."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.project.graph import ROOT, modules, path_of, tree_of

# Names that still occur twice. The list only shrinks: a test fails when a name in it has become unique.
DOUBLED: frozenset[str] = frozenset()

# Last words of class names without a line in the glossary or in field_words.txt: rename the class, or explain the word.
UNEXPLAINED = frozenset(
    """
    dropping other anatomy announcement answers arrived auditor awaited balance begin board books both broken carrier
    change changed chunked clusters coming compared content d done e effect end exchanged expected facts
    fill filling findings flow form formula found from front frozen gone held idle in incoming latest
    leaving levels loaded loads location made mailed mark materializer mine mover mul native nested once
    operands owners padded pages part parts peer pending placed posted prepared reached readable receipt
    reminder removal remover rerunnable resident rest rising root rounded rounding seen selected set
    shaped shares sharing subject sums target through to together trained trimmer turning unpacking
    unused usable users utils whole width writable
    """.split()
)
_FIELD = Path(__file__).with_name("field_words.txt")  # words of PyTorch, NCCL, MPI, Megatron, Python and papers


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


def head_of(name: str) -> str:
    """The last word of a class name, in small letters."""
    words = re.findall(r"[A-Z]+(?=[A-Z][a-z]|$|\d)|[A-Z]?[a-z]+", name)
    return words[-1].lower()


def explained() -> set[str]:
    """The words of the glossary and of ``field_words.txt``."""
    words = set(_FIELD.read_text(encoding="utf-8").split())
    for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            words.update(re.findall(r"[\w-]+", line.split("|")[1].lower()))
    return words


def test_last_words_of_class_names_are_explained():
    known = explained() | UNEXPLAINED
    missing = {each.name: each.place for each in classes() if head_of(each.name) not in known}
    assert not missing, (
        "rename these classes by the field's word, or explain the word in docs/glossary.md:\n"
        + "\n".join(f"{name}: {place}" for name, place in sorted(missing.items()))
    )


def test_list_of_unexplained_words_only_shrinks():
    done = {word for word in UNEXPLAINED if word in explained()} | (UNEXPLAINED - {head_of(c.name) for c in classes()})
    assert not done, f"take them from UNEXPLAINED: {', '.join(sorted(done))}"
