"""Configurations as the planner handles them: read, looked into and changed, and never written to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from deepspeed.config.source import read_source


def read_config(source: Any) -> dict[str, Any]:
    """The configuration as a dict of its own: from a dict, a path, or base64."""
    return copy.deepcopy(dict(read_source(source).data))


def changed(config: Mapping[str, Any], **zero: Any) -> dict[str, Any]:
    """A copy of a configuration with other keys in ``zero_optimization``; None takes a key out."""
    made = copy.deepcopy(dict(config))
    section = dict(made.get("zero_optimization") or {})
    for name, value in zero.items():
        if value is None:
            section.pop(name, None)
        else:
            section[name] = value
    made["zero_optimization"] = section
    return made


def stage_of(config: Mapping[str, Any]) -> int:
    """The ZeRO stage of a configuration."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))
