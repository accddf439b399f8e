"""Class names: none occurs twice in the package, and the last word of each is known."""

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.project.graph import ROOT, modules, nodes_of, path_of

# Names that still occur twice. The list only shrinks: a test fails when a name in it has become unique.
DOUBLED: frozenset[str] = frozenset()

# Words that no library or paper of the field uses so. Where a name has one, the glossary explains it.
OWN = frozenset(
    "act anatomy channel claim continuation fragment interval island islands lease links listed loan maker "
    "membership moment pace place places recovery regroup roster run sketch slot spread squares tie tier tile trial "
    "visible wanted watch wire".split()
)
# Words of earlier versions -> the field's.
REPLACED = {
    "archipelago": "islands",
    "begun": "started",
    "dealt": "assigned, sharded",
    "holder": "replica, owner, storage",
    "holders": "replicas, owners",
    "mail": "message queue",
    "piece": "fragment, slice",
    "pieces": "fragments, slices",
    "rehearsal": "simulation",
    "room": "buffer",
    "rooms": "buffers",
    "segment": "fragment (of a tensor), pass (forward or backward)",
    "segments": "fragments, passes",
    "standing": "coordinates",
    "stretch": "run",
    "told": "received",
    "waypoint": "trace point",
    "wires": "channels",
}
KEPT = {
    "pieces",  # of apply_delta, as users pass it
    "attach_segments",  # a public method of Muon and FusedLamb
    "_attach_segments",
    "segment_reduce",  # torch's
    "_SegmentTree",  # the data structure
    "is_begun",  # a key in checkpoints
    "wires",  # a public parameter of PipelineEngine.start_interpreter
}

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
        for node in nodes_of(module, ast.ClassDef):
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
    known = explained()
    missing = {each.name: each.place for each in classes() if head_of(each.name) not in known}
    assert not missing, (
        "rename these classes by the field's word, or explain the word in docs/glossary.md:\n"
        + "\n".join(f"{name}: {place}" for name, place in sorted(missing.items()))
    )


def own_words() -> list[str]:
    """The first column of the glossary's table of words of our own."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").partition("## Words of our own")[2]
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")][1:]


@cache
def identifiers() -> dict[str, list[str]]:
    """Names of classes, functions, arguments, variables, attributes and modules -> where they occur."""
    found: dict[str, list[str]] = {}
    for module in modules():
        for name in module.split("."):
            found.setdefault(name, []).append(module)
        for node in nodes_of(module, ast.ClassDef, ast.FunctionDef, ast.arg, ast.Name, ast.Attribute):
            name = next(getattr(node, field) for field in ("name", "arg", "id", "attr") if hasattr(node, field))
            found.setdefault(name, []).append(f"{path_of(module).relative_to(ROOT)}:{node.lineno}")
    return found


def words_of(name: str) -> list[str]:
    """The words of an identifier, in small letters."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def test_the_glossary_explains_no_word_that_is_gone():
    """Each row of the words of our own has a word that some name in the code has."""
    used = {word for name in identifiers() for word in words_of(name)}
    gone = [row for row in own_words() if used.isdisjoint(re.findall(r"[a-z]+", row.lower()))]
    assert not gone, f"take these rows out of docs/glossary.md: {gone}"


def test_words_of_our_own_in_names_are_explained():
    known = {word for row in own_words() for word in re.findall(r"[a-z]+", row.lower())}
    used = {word for name in identifiers() for word in words_of(name)}
    missing = sorted((OWN & used) - known)
    assert not missing, f"explain these words in docs/glossary.md, or use the field's word: {missing}"


def test_words_that_the_field_names_otherwise_are_not_used():
    found = {
        f"{name} ({places[0]})": REPLACED[word]
        for name, places in identifiers().items()
        for word in words_of(name)
        if word in REPLACED and name not in KEPT
    }
    assert not found, "use the field's word:\n" + "\n".join(f"{name}: {word}" for name, word in sorted(found.items()))
