"""Generated from the declarations: setting a key that no code reads gets a notice or is refused."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import deepspeed
from deepspeed.config import parse
from deepspeed.config.describe import KeyEntry, default_of, entries
from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError
from tests.config.support import nest, written
from tests.config.test_every_key import leaves

PACKAGE = Path(deepspeed.__file__).parent
# A mere remark.
COMPARED = {"comment"}
# These have one value only, alone or beside the defaults of other keys.
ONE_VALUE = {
    "expert_parallel.expert_tensor_parallel_size",
    "hybrid_engine.inference_tp_size",
}


def words_of_the_code() -> set[str]:
    """Attributes and texts of all code that could act on a key: the rest only describes keys or hands them back."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE)
        if place.parts[0] != "config" and place.as_posix() != "engine/accessors.py":
            found.update(re.findall(r"""\.(\w+)\b|["'](\w+)["']""", path.read_text()))
    return {word for pair in found for word in pair if word}


def other_values(entry: KeyEntry) -> Iterator[Any]:
    """Values to try, none of them the default."""
    default, found = default_of(entry.field), []
    for kind in leaves(entry.field.annotation):
        if kind is bool:
            found.append(default is not True)
        elif get_origin(kind) is Literal:
            found += get_args(kind)
        else:
            found += {int: [2, 3], float: [0.5, 0.25], str: ["some/text"]}.get(kind, [])
    for value in (*found, *([each] for each in found), {}, {"a": 1}, "fp32", "bf16"):
        if value != default:
            yield value


def has_notice(entry: KeyEntry) -> bool | None:
    """Whether another value alone is refused as unavailable or gets a line; None if none is accepted."""
    for value in other_values(entry):
        try:
            return bool(parse({"train_batch_size": 8, **nest(entry.path, value)}, dp_world_size=2).notices)
        except DeepSpeedConfigError as error:
            if any("does not exist here yet" in problem for problem in error.problems):
                return True
    return None


def test_a_key_that_nothing_reads_gets_a_notice() -> None:
    used = words_of_the_code()
    unread = [
        entry
        for entry in entries(Root)
        if entry.nested is None and used.isdisjoint({str(entry.path[-1]), *entry.facts.aliases})
    ]
    noted = {written(entry.path): has_notice(entry) for entry in unread}
    assert len(noted) > 100
    assert {name for name, answer in noted.items() if answer is False} == COMPARED
    assert {name for name, answer in noted.items() if answer is None} == ONE_VALUE


def test_no_key_claims_that_an_existing_feature_is_missing() -> None:
    """Missing features are the rows of ``deepspeed.missing_features``; a key's note may not claim more of them."""
    notes = {written(entry.path): entry.facts.no_effect or "" for entry in entries(Root)}
    assert [name for name, note in notes.items() if "exist" in note and "yet" in note] == []
    given = {"train_batch_size": 8, "use_data_before_expert_parallelism": True}
    assert not any("expert" in notice for notice in parse(given, dp_world_size=2).notices)
