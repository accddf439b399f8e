"""Enumerations that programs import to spell values of the configuration."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any

from pydantic import BaseModel, ConfigDict

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist


class OffloadDeviceEnum(str, Enum):
    """Names the places where shards can be kept."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """The kinds of state that ``engine.offload_states`` moves."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class ZeroStageEnum(IntEnum):
    """Numbers the ZeRO stages. Each shards what the stage before it shards, and one model state more."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


class DeepSpeedConfigModel(BaseModel):
    """A base for a program's own configuration: unknown names are refused, values and defaults are checked.

    A value ``"auto"`` stands for the field's default. Enumerations are stored as their values, fields may be given by
    name or alias, and an assignment is checked like a value at the start.

    A field with ``json_schema_extra={"deprecated": True, "new_param": name}`` is an old name of the field ``name``
    (``section.name`` for one of a nested model): a value given for it is logged and becomes the value of both. Further
    entries are ``new_param_fn``, which converts the value for the new field; ``set_new_param``, False to leave the new
    field alone; and ``deprecated_msg``, a sentence for the log.

    Args:
        strict: Take ``"auto"`` as a value like any other.

    Raises:
        DeepSpeedConfigError: A field is given by both its names.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = {name: value for name, value in data.items() if strict or value != "auto"}
        _set_new_fields(type(self), given)
        super().__init__(**given)


def _set_new_fields(model: type[BaseModel], given: dict[str, Any]) -> None:
    """Adds to ``given`` the values of new fields that it has under deprecated names."""
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        entered = next((key for key in (name, field.alias) if key in given), None)
        if entered is None or not isinstance(extra, dict) or not extra.get("deprecated"):
            continue
        new, convert = extra.get("new_param"), extra.get("new_param_fn")
        advice = f"use {new} instead. " if new else ""
        text = f"{model.__name__}.{entered} is deprecated; {advice}{extra.get('deprecated_msg', '')}"
        log_dist(text.rstrip("; "), level=logging.WARNING)
        if not new or not extra.get("set_new_param", True):
            continue
        *sections, last = str(new).split(".")
        target = given
        for section in sections:
            target[section] = dict(target.get(section, {}))
            target = target[section]
        if last in target:
            raise DeepSpeedConfigError(
                f"{model.__name__}: {entered} is an old name of {new}, and both are given; leave {entered} out"
            )
        target[last] = convert(given[entered]) if callable(convert) else given[entered]


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Returns a value of a configuration dict, or its default."""
    return param_dict.get(param_name, param_default_value)
