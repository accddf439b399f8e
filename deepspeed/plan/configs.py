"""Reads configurations for the planner and returns changed copies."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from deepspeed.config import parse
from deepspeed.config.batch import ACCUMULATION, MICRO, TOTAL
from deepspeed.config.reader import BATCH_KEYS
from deepspeed.config.sections.root import Root
from deepspeed.config.source import read_source
from deepspeed.config.types import to_bool, to_int


def read_config(source: Any) -> dict[str, Any]:
    """Returns a copy of a dict, file or base64 as a dict; the old ``zero_optimization: true`` becomes a section."""
    found = copy.deepcopy(dict(read_source(source).data))
    zero = found.get("zero_optimization")
    if isinstance(zero, bool) or (isinstance(zero, str) and zero.strip().lower() in ("true", "false")):
        found["zero_optimization"] = {"stage": int(to_bool(zero))}
    return found


def keys_of(config: Mapping[str, Any]) -> Root:
    """Returns the keys as the engine reads them, but no batch sizes; DeepSpeedConfigError lists what is refused."""
    return parse({**without_batch(config), MICRO: 1}).root


def without_batch(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a configuration that leaves the batch sizes open."""
    return {name: value for name, value in config.items() if name not in (*BATCH_KEYS, "elasticity")}


def with_batch(
    config: Mapping[str, Any], ranks: int, micro_batch: int | None, accumulation: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Returns the configuration with the requested batch (None: its own; global one if possible), and notices."""
    made, notices = copy.deepcopy(dict(config)), []
    if accumulation is not None:
        made[ACCUMULATION] = accumulation
        if made.pop(TOTAL, None) is not None:
            notices.append(f"{TOTAL} was left out, as the number of micro-batches is given (accumulation)")
    total = number_in(made, TOTAL)
    if micro_batch is None and total is None and number_in(made, MICRO) is None and not _chooses_batch(made):
        micro_batch = 1
        notices.append("the configuration leaves the micro-batch open; planned with 1 sample")
    if micro_batch is None:
        return made, notices
    made[MICRO] = micro_batch
    if total is None:
        made.pop(TOTAL, None)
    elif total % (micro_batch * ranks) == 0:
        made.pop(ACCUMULATION, None)
    else:
        made.pop(TOTAL)
        notices.append(
            f"{TOTAL} {total} is not a multiple of micro-batch {micro_batch} x {ranks} ranks, so it was left out"
        )
    return made, notices


def number_in(config: Mapping[str, Any], name: str) -> int | None:
    """Returns the whole number under ``name``, also from numeric text; None: it is missing, open or refused."""
    try:
        return to_int(config.get(name))
    except ValueError:
        return None


def _chooses_batch(config: Mapping[str, Any]) -> bool:
    section = config.get("elasticity")
    try:
        return isinstance(section, Mapping) and to_bool(section.get("enabled", False))
    except ValueError:
        return False


def changed(config: Mapping[str, Any], **zero: Any) -> dict[str, Any]:
    """Returns a configuration with keys of ``zero_optimization`` changed, old spellings too; None removes a key."""
    made = copy.deepcopy(dict(config))
    section = dict(made.get("zero_optimization") or {})
    for name, value in zero.items():
        for old in _OLD_SPELLINGS.get(name, ()):
            section.pop(old, None)
        if value is None:
            section.pop(name, None)
        else:
            section[name] = value
    made["zero_optimization"] = section
    return made


_OLD_SPELLINGS = {"offload_optimizer": ("cpu_offload",), "offload_param": ("cpu_offload_param", "cpu_offload_params")}


def stage_of(config: Mapping[str, Any]) -> int:
    """Returns the ZeRO stage of a configuration."""
    return keys_of(config).zero_optimization.stage


def offloads_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """Returns where optimizer states and parameters live: ``none`` (on the device), ``cpu`` or ``nvme``."""
    zero = keys_of(config).zero_optimization
    sections = (zero.offload_optimizer, zero.offload_param)
    states, parameters = ("none" if section is None else section.device for section in sections)
    return states, parameters
