"""Generated from the declarations: every misspelling and every impossible value of every key is refused by name."""

import string
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_origin

import pytest

from deepspeed.config import parse
from deepspeed.config.deprecated import OLD_KEYS
from deepspeed.config.describe import KeyEntry, _members, entries, spellings
from deepspeed.config.messages import ConfigMessages
from deepspeed.config.reader import BATCH_KEYS, build, clean
from deepspeed.config.section import Section, facts_of
from deepspeed.config.sections.inference import Inference
from deepspeed.config.sections.optimizer import (
    OWN_OPTIMIZERS,
    TORCH_OPTIMIZERS,
    TorchAdamParams,
    TorchAdamWParams,
)
from deepspeed.config.sections.root import Root
from deepspeed.config.sections.scheduler import OWN_SCHEDULERS, TORCH_SCHEDULERS
from tests.config.support import nest, problems, written

PARAMETERS = {
    **{f"optimizer {name}": model for name, model in {**OWN_OPTIMIZERS, **TORCH_OPTIMIZERS}.items()},
    "optimizer Adam, torch": TorchAdamParams,
    "optimizer AdamW, torch": TorchAdamWParams,
    **{f"scheduler {name}": model for name, model in {**OWN_SCHEDULERS, **TORCH_SCHEDULERS}.items()},
}
SEPARATE = {**PARAMETERS, "inference": Inference}
# The only numbers that may be -1.
MINUS_ONE = {"mics_shard_size", "module_depth", "last_batch_iteration", "last_epoch", "dampening", "profile_step"}


def misspellings(name: str) -> set[str]:
    """Names one character away: each deletion, doubling and swap, and an insertion and substitution at each place."""
    letters = string.ascii_lowercase
    found = set()
    for place, character in enumerate(name):
        other = letters[(place * 7 + ord(character)) % 26]
        other = "q" if other == character else other
        found |= {
            name[:place] + name[place + 1 :],
            name[:place] + character + name[place:],
            name[:place] + other + name[place:],
            name[:place] + other + name[place + 1 :],
            name[:place] + character.upper() + name[place + 1 :],
            name[:place] + name[place + 1 : place + 2] + character + name[place + 2 :],
        }
    found |= {name + "s", name + " ", " " + name, name.replace("_", "-", 1)}
    return {each for each in found if not each.startswith("_")} - {name, ""}


@cache
def old_names() -> dict[tuple[Any, ...], set[str]]:
    """The old keys of each section."""
    table: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    for entry in OLD_KEYS:
        table[entry.old[:-1]].add(str(entry.old[-1]))
    table[()].add("allgather_size")
    return table


def sections_of(model: type[Section]) -> Iterator[tuple[tuple[Any, ...], type[Section]]]:
    """Every section with its path."""
    yield (), model
    for entry in entries(model):
        if entry.nested is not None:
            step = {"section": (), "list": ("[]",), "map": ("<name>",)}[entry.nested.kind]
            yield (*entry.path, *step), entry.nested.model


def wrong_names(model: type[Section], path: tuple[Any, ...]) -> dict[str, str]:
    """Misspelt names of a section with the key each comes from."""
    valid = set(spellings(model)) | old_names()[path]
    return {wrong: name for name in sorted(valid) for wrong in misspellings(name) if wrong not in valid}


def named(found: tuple[str, ...]) -> dict[str, str]:
    """Problems by the key they begin with."""
    table: dict[str, str] = {}
    for problem in found:
        name, _, text = problem.partition(": ")
        table[name] = text
    return table


def check(model: type[Section], data: dict[str, Any]) -> tuple[str, ...]:
    """The problems of data read as a section of its own."""
    findings = ConfigMessages({}, {}, None)
    build(model, clean(model, data, (), findings), (), findings)
    return findings.problems()


def assert_refused(found: tuple[str, ...], path: tuple[Any, ...], wrong: dict[str, str]) -> int:
    """Every name was refused by its full name; returns how often the suggestion was the key it came from."""
    table, right = named(found), 0
    for name, meant in wrong.items():
        full = written((*path, name))
        assert table.get(full, "").startswith("unknown key; "), f"{full} was not refused by name"
        right += f'"{written((*path, meant))}"' in table[full]
    return right


def test_every_misspelling_in_a_training_configuration() -> None:
    right = total = 0
    for path, model in sections_of(Root):
        wrong = wrong_names(model, path)
        right += assert_refused(problems(nest(path, dict.fromkeys(wrong))), path, wrong)
        total += len(wrong)
    assert total > 15_000
    assert right / total > 0.97, f"only {right} of {total} suggestions were the key that was misspelt"


@pytest.mark.parametrize("name", SEPARATE)
def test_every_misspelling_of_parameters_and_inference(name: str) -> None:
    for path, model in sections_of(SEPARATE[name]):
        wrong = wrong_names(model, ("elsewhere",))
        assert_refused(check(SEPARATE[name], nest(path, dict.fromkeys(wrong))), path, wrong)


def test_misspelt_parameters_are_reached_through_the_configuration() -> None:
    for kind, table in (
        ("optimizer", {**OWN_OPTIMIZERS, **TORCH_OPTIMIZERS}),
        ("scheduler", {**OWN_SCHEDULERS, **TORCH_SCHEDULERS}),
    ):
        for name, model in table.items():
            wrong = {f"{each}x": each for each in model.model_fields}
            found = problems({kind: {"type": name, "params": dict.fromkeys(wrong, 1)}})
            assert_refused(found, (kind, "params"), wrong)


def leaves(annotation: Any) -> set[Any]:
    """The plain types behind an annotation, entries of lists included."""
    found: set[Any] = set()
    for member in _members(annotation):
        found |= leaves(get_args(member)[0]) if get_origin(member) is list else {member}
    return found


def is_number(entry: KeyEntry) -> bool:
    kinds = leaves(entry.field.annotation)
    return bool(kinds & {int, float}) and not kinds & {str, Any}


def is_closed(entry: KeyEntry) -> bool:
    """Whether the key takes only numbers, switches or listed words."""
    kinds = leaves(entry.field.annotation)
    return entry.nested is None and not any(kind in (str, Any) or get_origin(kind) is dict for kind in kinds)


def all_entries() -> Iterator[tuple[type[Section], KeyEntry]]:
    for model in (Root, Inference, *PARAMETERS.values()):
        for entry in entries(model):
            yield model, entry


def refused_values(value: Any, wanted: Any) -> tuple[int, set[str]]:
    """Gives ``value`` to every wanted key, one configuration per section; returns count and keys that let it pass."""
    groups: dict[tuple[type[Section], tuple[Any, ...]], list[KeyEntry]] = defaultdict(list)
    for model, entry in all_entries():
        if wanted(entry):
            groups[model, entry.path[:-1]].append(entry)
    passed, count = set(), 0
    for (model, path), group in groups.items():
        data = nest(path, {str(entry.path[-1]): value for entry in group})
        table = named(problems(data, batch=False) if model is Root else check(model, data))
        for entry in group:
            count += 1
            if not table.get(written(entry.path), "").startswith("expected "):
                passed.add(written(entry.path))
    return count, passed


def test_text_is_no_number() -> None:
    count, passed = refused_values("abc", is_number)
    assert count > 200 and not passed


def test_minus_one_is_refused_where_it_cannot_be() -> None:
    count, passed = refused_values(-1, is_number)
    assert count > 200
    assert {name.rsplit(".", 1)[-1] for name in passed} == MINUS_ONE


def test_switches_and_choices_refuse_other_words() -> None:
    count, passed = refused_values("abc", is_closed)
    assert count > 500 and not passed
    assert not refused_values(float("nan"), is_closed)[1]
    assert not refused_values({"a": 1}, is_closed)[1]


def test_every_default_is_accepted_without_a_notice() -> None:
    """Written out in full, the defaults are the empty configuration."""
    root = Root(train_batch_size=8)
    full = {name: value for name, value in root.model_dump().items() if value is not None}
    parsed = parse(full)
    assert parsed.root == root
    assert parsed.notices == []


# Their presence alone asks for something that does not exist yet.
PRESENCE = {
    ("datastates_ckpt",),
    ("weight_quantization",),
    ("zero_optimization", "zenflow"),
    ("checkpoint", "writer"),
}


def test_auto_is_the_default_everywhere() -> None:
    for path, model in sections_of(Root):
        if any(path[: len(each)] == each for each in PRESENCE):
            continue
        names = [name for name in model.model_fields if path or name not in BATCH_KEYS]
        own = {name for name in names if facts_of(model.model_fields[name]).own_auto}
        parsed = parse({"train_batch_size": 8, **nest(path, dict.fromkeys(names, "auto"))})
        spoken = {line.partition(":")[0] for line in parsed.notices if '"auto" became' in line}
        assert spoken == {written((*path, name)) for name in set(names) - own}


def test_every_key_is_documented() -> None:
    for _, entry in all_entries():
        about = entry.facts.about
        assert len(about) >= 4 and about.endswith("."), f"{written(entry.path)}: {about!r}"
