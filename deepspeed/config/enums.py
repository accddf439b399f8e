"""Enumerations that programs import to spell values of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum
from typing import Any

from pydantic import BaseModel, ConfigDict


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
    """Returns a value of a configuration dict, or its default."""
    return param_dict.get(param_name, param_default_value)
