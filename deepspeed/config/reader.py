"""Turns raw data into validated sections: comments out, spellings resolved, ``"auto"`` replaced, unknown keys named."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from deepspeed.config.describe import (
    NestedSection,
    default_of,
    expectation,
    is_nullable,
    nested_fields,
    spellings,
)
from deepspeed.config.messages import ConfigMessages, Path, dotted, shown
from deepspeed.config.section import Section, facts_of, is_switched_off
from deepspeed.config.suggest import is_foreign, suggestion

AnySection = TypeVar("AnySection", bound=Section)
UNKNOWN_KEYS_VARIABLE = "DEEPSPEED_UNKNOWN_CONFIG_KEYS"


def structural_copy(value: Any) -> Any:
    """Returns a copy of the objects and lists, sharing the leaves; keys that begin with an underscore are comments.

    Mappings and sequences of other types, such as those of OmegaConf, become dicts and lists.
    """
    if isinstance(value, Mapping):
        return {
            name: structural_copy(item)
            for name, item in value.items()
            if not (isinstance(name, str) and name.startswith("_"))
        }
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes, tuple))
    return [structural_copy(item) for item in value] if is_list else value


def is_auto(value: Any) -> bool:
    """Returns whether a value requests the default."""
    return isinstance(value, str) and value.strip().lower() == "auto"


def _report_foreign(names: list[str], findings: ConfigMessages) -> None:
    """Warns in one line of keys that are like none of this package, so that no key can be meant."""
    if names:
        verb = "is" if len(names) == 1 else "are"
        findings.warning(
            f"{', '.join(findings.label((name,)) for name in names)} {verb} ignored: no key of this package has such a "
            "name. Leave out what no other program reads, or begin its name with an underscore"
        )


def report_unknown(path: Path, valid: list[str], findings: ConfigMessages) -> None:
    """Refuses an unknown key, or warns of it where the environment variable requests that."""
    advice = suggestion(path, valid)
    mode = os.environ.get(UNKNOWN_KEYS_VARIABLE, "")
    if mode.strip().lower() == "warn":
        findings.notice(f"{findings.label(path)} is not a known key and is ignored; {advice}")
    else:
        findings.add(path, f"{findings.label(path)}: unknown key; {advice}")


def clean(
    model: type[Section], data: dict[Any, Any], path: Path, findings: ConfigMessages, off: Path | None = None
) -> dict[str, Any]:
    """Returns the declared keys of ``data`` under their proper names, ready for validation.

    Args:
        findings: Receives unknown keys, doubled spellings, and what every ``"auto"`` became.
        off: The switch that is false in a section around this one, if there is such a switch.
    """
    if off is None and is_switched_off(model, data):
        off = (*path, str(model.switch()))
    names, inner = spellings(model), nested_fields(model)
    cleaned: dict[str, Any] = {}
    foreign: list[str] = []
    for written, value in data.items():
        name = names.get(written) if isinstance(written, str) else None
        if name is None and model._is_shared and is_foreign(str(written), list(names)):
            foreign.append(str(written))
            continue
        if name is None and off is not None:
            findings.notice(
                f"{findings.label((*path, str(written)))} is not a known key, and has no effect: {dotted(off)} is false"
            )
            continue
        if name is None:
            report_unknown((*path, str(written)), list(names), findings)
            continue
        here = (*path, name)
        if name != written:
            if name in data:
                findings.problem(
                    (*path, written), f"is another spelling of {dotted(here)}, which is given too; keep one of them"
                )
                continue
            findings.spelled[here] = (*findings.written(path), written)
        field = model.model_fields[name]
        if is_auto(value) and not facts_of(field).own_auto:
            if field.is_required() or facts_of(field).must_fill:
                findings.fail(here, f'"auto" is left in it, and nothing fills it in; expected {expectation(field)}')
                continue
            if not (path == () and name in BATCH_KEYS):
                findings.warning(f'{findings.label(here)}: "auto" became {_default_text(model, name)}')
            continue
        if value is None and not is_nullable(field.annotation) and not (field.is_required() or default_of(field)):
            continue  # null is as good as the default: false, 0, or empty
        nested = inner.get(name)
        if nested is None:
            cleaned[name] = value
        else:
            found = _clean_nested(nested, value, here, findings, off)
            if found is not None:
                cleaned[name] = found
    _report_foreign(foreign, findings)
    return cleaned


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _default_text(model: type[Section], name: str) -> str:
    field = model.model_fields[name]
    value, facts = default_of(field), facts_of(field)
    if isinstance(value, Section):
        return "its defaults"
    if value is None and facts.null_means:
        return f"null ({facts.null_means})"
    return shown(value)


def _clean_nested(nested: NestedSection, value: Any, path: Path, findings: ConfigMessages, off: Path | None) -> Any:
    if value is None:
        return None
    if nested.kind == "list":
        if not isinstance(value, (list, tuple)):
            findings.fail(path, f"expected a list of objects, found {shown(value)}")
            return None
        items = [_clean_object(nested.model, item, (*path, i), findings, off) for i, item in enumerate(value)]
        return [item for item in items if item is not None]
    if nested.kind == "map":
        if not isinstance(value, dict):
            findings.fail(path, f"expected an object of named objects, found {shown(value)}")
            return None
        named = {str(k): _clean_object(nested.model, item, (*path, str(k)), findings, off) for k, item in value.items()}
        return {name: item for name, item in named.items() if item is not None}
    if isinstance(value, bool) and path == ("datastates_ckpt",):
        return {} if value else None
    return _clean_object(nested.model, value, path, findings, off)


def _clean_object(
    model: type[Section], value: Any, path: Path, findings: ConfigMessages, off: Path | None
) -> dict[str, Any] | None:
    if isinstance(value, Section):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, dict):
        return clean(model, value, path, findings, off)
    switch = model.switch()
    is_flag = switch is not None and isinstance(model.model_fields[switch].default, bool)
    example = f'{{"{switch}": true}}' if is_flag else "{...}"
    findings.fail(path, f"expected an object such as {example}, found {shown(value)}")
    return None


def build(model: type[AnySection], cleaned: dict[str, Any], path: Path, findings: ConfigMessages) -> AnySection | None:
    """Validates cleaned data and reports every misfit; returns None if a required key is missing.

    Refused values are taken out and the rest is validated again, so that the rules between keys see a whole section.
    """
    while True:
        try:
            return model.model_validate(cleaned)
        except ValidationError as error:
            missing = False
            refused: dict[Path, None] = {}  # A set in order: a union reports one key once per member.
            for detail in error.errors(include_url=False, include_context=False):
                if detail["type"] == "missing":
                    findings.fail((*path, *detail["loc"]), "is required here and is missing")
                    missing = True
                else:
                    refused[_existing(cleaned, detail["loc"])] = None
            for where in refused:
                _refuse(model, cleaned, where, path, findings)
            if missing:
                return None


def _existing(data: Any, location: tuple[int | str, ...]) -> Path:
    """Returns the part of pydantic's location that exists in the data; what follows are names of union members."""
    where: Path = ()
    for part in location:
        inside = isinstance(data, dict) and part in data
        inside = inside or (isinstance(data, list) and isinstance(part, int) and part < len(data))
        if not inside:
            break
        data = data[part]  # type: ignore[index]
        where = (*where, part)
    return where


def _refuse(model: type[Section], cleaned: dict[str, Any], where: Path, path: Path, findings: ConfigMessages) -> None:
    """Reports the value at ``where`` and takes the whole key out of the data.

    In a section that is switched off, it gives only a line: whatever the value, it would change nothing.
    """
    parent: Any = cleaned
    section: type[Section] | None = model
    key_at: Path = ()
    off: Path | None = None
    field = None
    parts = list(where)
    while parts and section is not None:
        if off is None and is_switched_off(section, parent):
            off = (*path, *key_at, str(section.switch()))
        name = str(parts.pop(0))
        key_at = (*key_at, name)
        field = section.model_fields[name]
        nested = nested_fields(section).get(name)
        if nested is None or not parts:
            break
        parent, section = parent[name], nested.model
        if nested.kind != "section":
            step = parts.pop(0)
            key_at = (*key_at, step)
            parent = parent[step]
    assert field is not None
    if key_at[-1] not in parent:
        return  # Another entry of the same list or object took it out already.
    text = f"expected {expectation(field)}, found {shown(parent[key_at[-1]])}"
    if off is None:
        findings.fail((*path, *key_at), text)
    else:
        findings.notice(f"{findings.label((*path, *key_at))}: {text}; it has no effect, as {dotted(off)} is false")
    del parent[key_at[-1]]
