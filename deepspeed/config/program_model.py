"""The base of configuration objects that programs define themselves, and a helper to read one value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class DeepSpeedConfigModel(BaseModel):
    """A base for a program's own configuration: unknown names are refused, values and defaults are checked.

    A value ``"auto"`` stands for the field's default. Enumerations are stored as their values, fields may be given by
    name or alias, and an assignment is checked like a value at the start.

    Args:
        strict: Take ``"auto"`` as a value like any other.
        **data: The fields.
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
        super().__init__(**{name: value for name, value in data.items() if strict or value != "auto"})


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """A value of a configuration dict, or its default."""
    return param_dict.get(param_name, param_default_value)
