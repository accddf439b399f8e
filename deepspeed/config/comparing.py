"""Compares the keys of a configuration with the original package: what each does there, and here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from deepspeed.config.describe import default_of, nested_in
from deepspeed.config.messages import Path, dotted
from deepspeed.config.parsing import parse
from deepspeed.config.section import KeyInfo, Section, facts_of
from deepspeed.config.sections.root import Root
from deepspeed.config.source import read_source
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.missing_features import FEATURES

_MISSING = {key.name: feature.instead for feature in FEATURES for key in feature.keys}
_REMOVED_OPTIMIZERS = dict.fromkeys(("onebitadam", "zerooneadam", "onebitlamb"), "0.19.8")
OTHER_DEFAULTS = {
    "autotuning.end_profile_step": "5",
    "autotuning.tuner_num_trials": "50",
    "autotuning.tuner_type": '"gridsearch"',
    "communication_data_type": "fp16 or bf16 if enabled",
    "data_types.grad_accum_dtype": "the model's dtype",
    "pipeline.use_reentrant": "true",
    "sequence_parallel_size": "none",
    "zero_optimization.overlap_comm": "true at stage 3 only",
}
"""By key, the original's default where it is not the one here; docs/migrating/defaults.md has the reasons."""


def compared_keys(source: Any) -> list[tuple[str, str]]:
    """Returns every key of a configuration, in its order, with how it compares with the original."""
    problems: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    try:
        notices = tuple(parse(source).notices)
    except DeepSpeedConfigError as error:
        problems = error.problems
    paths = _leaves(read_source(source).data, ())
    return [(dotted(path), _comparison(path, value, problems, notices)) for path, value in paths]


def removed_keys(data: dict[str, Any]) -> dict[str, str]:
    """Returns the outermost keys of a configuration that the original removed and that work here, with its release."""
    found: dict[str, str] = {}
    for path, value in _leaves(data, ()):
        known = _facts_along(path)
        release = _removing_release(path, value, known)
        if release is None or any(facts.no_effect for facts in known) or _instead_of(path) is not None:
            continue
        place = next((n for n, facts in enumerate(known) if facts.removed), len(path) - 1)
        found.setdefault(dotted(path[: place + 1]), release)
    return found


def _leaves(data: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(data, dict) and data:
        for name, value in data.items():
            yield from _leaves(value, (*path, str(name)))
    else:
        yield path, data


def _facts_along(path: Path) -> list[KeyInfo]:
    model: type[Section] | None = Root
    found = []
    for part in path:
        if model is None:
            break
        field = model.model_fields.get(str(part))
        if field is None:
            break
        found.append(facts_of(field))
        nested = nested_in(field.annotation)
        model = None if nested is None else nested.model
    return found


def _comparison(path: Path, value: Any, problems: tuple[str, ...], notices: tuple[str, ...]) -> str:
    key, known = dotted(path), _facts_along(path)
    refusal = next((problem for problem in problems if _is_about(problem, path)), None)
    if refusal is not None:
        return f"refused here: {refusal.partition(': ')[2]}"
    facts = known[-1] if len(known) == len(path) else None
    release = _removing_release(path, value, known)
    effect = None if facts is None else facts.no_effect
    if release is not None:
        instead = _instead_of(path)
        here = "works here" if effect is None else f"no effect here: {effect}"
        return f"removed in {release}, " + (here if instead is None else f"does not exist here: {instead}")
    if effect is not None:
        return f"without effect: {effect}"
    if key in OTHER_DEFAULTS and facts is not None:
        return f"same, with another default: {OTHER_DEFAULTS[key]} there, {_default_text(path)} here"
    note = next((notice for notice in notices if _is_about(notice, path)), None)
    return "same" if note is None else f"same; {note}"


def _is_about(sentence: str, path: Path) -> bool:
    """Returns whether a problem or notice begins with a key, or with a section that contains it."""
    label = sentence.partition(":")[0].partition(" ")[0]
    return any(label == dotted(path[:length]) for length in range(1, len(path) + 1))


def _instead_of(path: Path) -> str | None:
    """Returns what to use in place of a feature that does not exist here; None for one that does."""
    parts = [dotted(path[:length]) for length in range(1, len(path) + 1)]
    return next((_MISSING[name] for part in parts for name in (part, f"{part}.enabled") if name in _MISSING), None)


def _removing_release(path: Path, value: Any, known: list[KeyInfo]) -> str | None:
    """Returns the release of the original that removed a key or the section around it; None for one that is there."""
    if path == ("optimizer", "type"):
        return _REMOVED_OPTIMIZERS.get(str(value).lower())
    return next((facts.removed for facts in known if facts.removed), None)


def _default_text(path: Path) -> str:
    model: Any = Root
    for part in path[:-1]:
        nested = nested_in(model.model_fields[part].annotation)
        assert nested is not None
        model = nested.model
    field = model.model_fields[path[-1]]
    default = default_of(field)
    if default is not None:
        return json.dumps(default)
    return re.split("[,;]", facts_of(field).null_means or "null")[0]
