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


def with_degrees(
    config: Mapping[str, Any], *, tensor: int | None = None, sequence: int | None = None, ep: int | None = None
) -> dict[str, Any]:
    """A copy of a configuration that asks for other degrees along the axes of the job.

    Args:
        config: The configuration.
        tensor: Ranks that share layers (``tensor_parallel.autotp_size``); None: as it says.
        sequence: Ranks that share a sequence (``sequence_parallel_size``); None: as it says.
        ep: Ranks that share experts (``expert_parallel.autoep_size``); None: as it says.
    """
    made = copy.deepcopy(dict(config))
    if tensor is not None:
        section = dict(made.get("tensor_parallel") or {})
        made["tensor_parallel"] = {**section, "autotp_size": tensor if tensor > 1 else 0}
    if sequence is not None:
        made["sequence_parallel_size"] = sequence
    if ep is not None:
        section = dict(made.get("expert_parallel") or {})
        made["expert_parallel"] = {**section, "enabled": ep > 1, "autoep_size": ep}
    return made
