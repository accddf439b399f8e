"""Reads the declarations: which sections nest in which, what a type is called, what JSON Schema it has."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from deepspeed.config.messages import Path
from deepspeed.config.section import KeyInfo, Section, facts_of


@dataclass(frozen=True)
class NestedSection:
    """A section inside a section: alone, in a list, or by names of the caller's own."""

    kind: Literal["section", "list", "map"]
    model: type[Section]  # the inner section


def _members(annotation: Any) -> tuple[Any, ...]:
    """Returns the alternatives of a type, ``Annotated`` taken off."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return tuple(member for part in get_args(annotation) for member in _members(part))
    return (annotation,)


def nested_in(annotation: Any) -> NestedSection | None:
    """Returns the section behind a key's type, if there is one."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, Section):
            return NestedSection("section", member)
        origin, arguments = get_origin(member), get_args(member)
        if origin is list and isinstance(arguments[0], type) and issubclass(arguments[0], Section):
            return NestedSection("list", arguments[0])
        if origin is dict and isinstance(arguments[1], type) and issubclass(arguments[1], Section):
            return NestedSection("map", arguments[1])
    return None


@cache
def nested_fields(model: type[Section]) -> dict[str, NestedSection]:
    """Returns the keys of a section that hold sections."""
    found = {name: nested_in(field.annotation) for name, field in model.model_fields.items()}
    return {name: nested for name, nested in found.items() if nested is not None}


@cache
def spellings(model: type[Section]) -> dict[str, str]:
    """Returns every accepted spelling of a section's keys, with the key meant."""
    table = {name: name for name in model.model_fields}
    for name, field in model.model_fields.items():
        for alias in facts_of(field).aliases:
            table[alias] = name
    return table


@dataclass(frozen=True)
class KeyEntry:
    """One declared key."""

    path: Path  # its path; ``<name>`` stands for a name of the caller's own, ``[]`` for an entry of a list
    field: FieldInfo  # the declaration
    facts: KeyInfo  # its description

    @property
    def nested(self) -> NestedSection | None:
        """The section that the key holds."""
        return nested_in(self.field.annotation)


def entries(model: type[Section], path: Path = ()) -> Iterator[KeyEntry]:
    """Yields all keys of a section and of those inside it, in order of declaration."""
    for name, field in model.model_fields.items():
        here = (*path, name)
        yield KeyEntry(here, field, facts_of(field))
        nested = nested_in(field.annotation)
        if nested is not None:
            step = {"section": (), "list": ("[]",), "map": ("<name>",)}[nested.kind]
            yield from entries(nested.model, (*here, *step))


def default_of(field: FieldInfo) -> Any:
    """Returns the default of a key; ``None`` for a required one."""
    return None if field.is_required() else field.get_default(call_default_factory=True)


def is_nullable(annotation: Any) -> bool:
    """Returns whether null is a value."""
    return type(None) in _members(annotation) or None in _members(annotation)


def _word(member: Any) -> str:
    if get_origin(member) is Literal:
        values = [f'"{value}"' if isinstance(value, str) else str(value) for value in get_args(member)]
        return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"
    if get_origin(member) is list:
        return f"a list of {type_words(get_args(member)[0], plural=True)}"
    if get_origin(member) is dict or (isinstance(member, type) and issubclass(member, Section)):
        return "an object"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "text", typing.Any: "any value"}
    return names.get(member, getattr(member, "__name__", str(member)))


def type_words(annotation: Any, interval: str = "", plural: bool = False) -> str:
    """Returns a type in words, singular or plural, with ``interval`` after numbers, null only if it is all there is."""
    members = [member for member in _members(annotation) if member not in (None, type(None))]
    if not members:
        return "null"
    plurals = {"an integer": "integers", "a number": "numbers", "text": "texts", "an object": "objects"}
    words = []
    for member in members:
        word = plurals.get(_word(member), _word(member)) if plural else _word(member)
        words.append(f"{word} {interval}" if interval and _is_numeric(member) else word)
    return " or ".join(dict.fromkeys(words))


def _is_numeric(member: Any) -> bool:
    inner = _members(get_args(member)[0]) if get_origin(member) is list else (member,)
    return any(each in (int, float) for each in inner)


def expectation(field: FieldInfo) -> str:
    """Returns the valid values of a key in words: type, interval, null."""
    words = type_words(field.annotation, facts_of(field).range_text())
    return f"{words}, or null" if is_nullable(field.annotation) and words != "null" else words


_JSON_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string"}


def json_types(annotation: Any) -> list[dict[str, Any]]:
    """Returns the JSON Schema alternatives of a type without sections."""
    alternatives: list[dict[str, Any]] = []
    for member in _members(annotation):
        if member is typing.Any:
            return [{}]
        if member in (None, type(None)):
            alternatives.append({"type": "null"})
        elif get_origin(member) is Literal:
            alternatives.append({"enum": list(get_args(member))})
        elif get_origin(member) is list:
            inner = json_types(get_args(member)[0])
            alternatives.append({"type": "array", "items": inner[0] if len(inner) == 1 else {"anyOf": inner}})
        elif get_origin(member) is dict:
            alternatives.append({"type": "object"})
        else:
            alternatives.append({"type": _JSON_TYPES[member]})
    return alternatives
