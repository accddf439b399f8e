"""The base of all configuration sections, and :func:`key`, which declares one key with its description.

A key is declared once: its type by annotation, the rest here. Validation, error messages, the reference page and the
JSON Schema all use these declarations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from deepspeed.config.deprecated import old_names, with_present_names
from deepspeed.config.messages import Path
from deepspeed.config.types import to_bool


@dataclass(frozen=True)
class KeyInfo:
    """Describes a configuration key, besides its name, type and default."""

    about: str  # what the key does, with its interactions
    unit: str | None = None  # unit of the value (elements, bytes, steps, ...)
    minimum: float | None = None  # least value, inclusive
    above: float | None = None  # bound that the value must exceed
    maximum: float | None = None  # greatest value, inclusive
    below: float | None = None  # bound that the value must stay under
    infinite: bool = False  # whether infinity is a value
    length: int | None = None  # number of entries of a list
    aliases: tuple[str, ...] = ()  # other spellings, equally good
    since: str | None = None  # release that brought the key
    removed: str | None = None  # release that dropped it; such keys are still accepted
    no_effect: str | None = None  # why the key changes nothing here; None for keys that work
    min_stage: int = 0  # the ZeRO stage from which the key has an effect
    own_auto: bool = False  # ``"auto"`` is a value of the key rather than a request for the default
    null_means: str | None = None  # what null stands for
    must_fill: bool = False  # ``"auto"`` that nothing has filled in is refused: the default would be a guess
    # ranks may differ in it: it changes only what a rank writes, shows or measures, or where its files are
    per_rank: bool = False
    feature: str | None = None  # module of the feature that the engine needs for a value other than the default

    def range_text(self) -> str:
        """Returns the allowed range of values in words, empty if any value is allowed."""
        lower = f">= {self.minimum:g}" if self.minimum is not None else ""
        lower = f"> {self.above:g}" if self.above is not None else lower
        upper = f"<= {self.maximum:g}" if self.maximum is not None else ""
        upper = f"< {self.below:g}" if self.below is not None else upper
        count = f"({self.length} of them)" if self.length is not None else ""
        return " ".join(part for part in (" and ".join(bound for bound in (lower, upper) if bound), count) if part)

    def admits(self, value: Any) -> bool:
        """Returns whether a number (or each of a list of numbers) lies in the interval; other values always do."""
        if isinstance(value, list):
            if self.length is not None and len(value) != self.length:
                return False
            return all(self.admits(item) for item in value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return True
        if isinstance(value, float) and math.isinf(value) and not self.infinite:
            return False
        return (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
        )


def key(default: Any, about: str, *, factory: Any = None, **facts: Any) -> Any:
    """Declares a key of a section.

    Args:
        default: Value when the key is absent; ``...`` makes it required.
        **facts: Fields of :class:`KeyInfo`.
    """
    extra: Any = {"facts": KeyInfo(about, **facts)}
    if factory is not None:
        return Field(default_factory=factory, description=about, json_schema_extra=extra)
    return Field(default, description=about, json_schema_extra=extra)


def facts_of(field: FieldInfo) -> KeyInfo:
    """Returns the facts that :func:`key` attached to a field."""
    extra = field.json_schema_extra
    assert isinstance(extra, dict), "every field of a section is declared with key()"
    facts = extra["facts"]
    assert isinstance(facts, KeyInfo)
    return facts


@cache
def _aliases(model: type[BaseModel]) -> dict[str, str]:
    return {alias: name for name, field in model.model_fields.items() for alias in facts_of(field).aliases}


class Section(BaseModel):
    """A section: strict types after coercion, nothing undeclared, immutable once read.

    Class attributes:
        switch_name: Name of the key, where a section has one, that turns it on.
        _other_switches: Keys with which the section has an effect although ``switch_name`` is false.
        place: The path of the section, for those that have old spellings.
        _is_shared: Whether other programs keep keys of their own in the same object.
        _feature: Module of the feature that the engine needs for it (``deepspeed.engine.features``); None: none.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, defer_build=True, protected_namespaces=(), populate_by_name=False
    )
    switch_name: ClassVar[str] = "enabled"
    _other_switches: ClassVar[tuple[str, ...]] = ()
    place: ClassVar[Path | None] = None
    _is_shared: ClassVar[bool] = False
    _feature: ClassVar[str | None] = None

    @classmethod
    def switch(cls) -> str | None:
        """Returns the key that turns the section on, if it has one; the others have no effect while it is off."""
        return cls.switch_name if cls.switch_name in cls.model_fields else None

    def is_used(self) -> bool:
        """Returns whether keys of the section have an effect although its switch is off."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _proper_names(cls, data: Any) -> Any:
        """Accepts aliases and old names when a program builds a section itself; files are resolved earlier."""
        if not isinstance(data, dict):
            return data
        if cls.place is not None and not old_names(cls.place).isdisjoint(data):
            data = with_present_names(data, cls.place)
        aliases = _aliases(cls)
        if aliases.keys().isdisjoint(data):
            return data
        for alias, name in aliases.items():
            if alias in data and name in data:
                raise ValueError(f"{alias} is another spelling of {name}, which is given too; keep one of them")
        return {aliases.get(name, name): value for name, value in data.items()}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Returns the value of the key that an alias stands for, as upstream's objects do."""
            proper = _aliases(type(self)).get(name)
            return super().__getattr__(name) if proper is None else getattr(self, proper)

    @field_validator("*", mode="after")
    @classmethod
    def _in_range(cls, value: Any, info: ValidationInfo) -> Any:
        assert info.field_name is not None
        if not facts_of(cls.model_fields[info.field_name]).admits(value):
            raise ValueError("out of range")
        return value

    def _own_features(self) -> Iterator[str]:
        """Yields the features that the section requests if it is not switched off."""
        is_off = self.switch() is not None and not getattr(self, self.switch_name)
        if self._feature is not None and not is_off:
            yield self._feature


def is_switched_off(model: type[Section], data: dict[str, Any]) -> bool:
    """Returns whether data of a section, as written, switches it off by name, so that no other key has an effect."""
    name = model.switch()
    if name is None or not isinstance(model.model_fields[name].default, bool):
        return False
    try:
        is_on = to_bool(data.get(name, True))
    except ValueError:
        return False
    return not is_on and not any(data.get(other) for other in model._other_switches)


def features_of(section: Section) -> Iterator[str]:
    """Yields the features that the sections given in this one request, in any order; one may come twice."""
    for name in section.model_fields_set:
        inner = getattr(section, name)
        declared = type(section).model_fields[name]
        if (feature := facts_of(declared).feature) is not None and inner != declared.default:
            yield feature
        if isinstance(inner, Section):
            yield from inner._own_features()
            yield from features_of(inner)
