"""Reads configurations for the planner and returns changed copies."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from deepspeed.config import parse
from deepspeed.config.batch import MICRO
from deepspeed.config.reader import BATCH_KEYS
from deepspeed.config.source import read_source
from deepspeed.config.types import to_bool


def read_config(source: Any) -> dict[str, Any]:
    """Returns a copy of the configuration as a dict; the old form ``zero_optimization: true`` becomes a section.

    Args:
        source: A dict, a path, or base64.
    """
    found = copy.deepcopy(dict(read_source(source).data))
    zero = found.get("zero_optimization")
    if isinstance(zero, bool) or (isinstance(zero, str) and zero.strip().lower() in ("true", "false")):
        found["zero_optimization"] = {"stage": int(to_bool(zero))}
    return found


def check_config(config: Mapping[str, Any]) -> None:
    """Raises for keys or values that the engine would refuse. Does not check batch sizes: the ranks are not known yet.

    Args:
        config: The configuration as a dict.

    Raises:
        DeepSpeedConfigError: Lists every problem.
    """
    parse({**without_batch(config), MICRO: 1})


def without_batch(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a configuration that leaves the batch sizes open."""
    return {name: value for name, value in config.items() if name not in BATCH_KEYS}


def changed(config: Mapping[str, Any], **zero: Any) -> dict[str, Any]:
    """Returns a copy of a configuration with changed keys in ``zero_optimization``; None removes a key."""
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
    """Returns the ZeRO stage of a configuration."""
    return int((config.get("zero_optimization") or {}).get("stage", 0))
