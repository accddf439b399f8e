"""The largest counts that are planned. Beyond any machine and model there is, a plan would only take hours."""

from __future__ import annotations

from typing import Any

from deepspeed.errors import DeepSpeedConfigError

_RANKS, _SAMPLES = 1 << 18, 1 << 30
LARGEST = {
    "layers": 1 << 11,
    "hidden": 1 << 16,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "head_size": 1 << 16,
    "intermediate": 1 << 24,
    "vocab": 1 << 24,
    "experts": 1 << 12,
    "experts_per_token": 1 << 12,
    "nodes": _RANKS,
    "devices": _RANKS,
    "ranks": _RANKS,
    "sequence_length": 1 << 27,
    "micro_batch": 1 << 20,
    "accumulation": 1 << 20,
    "num_chunks": 1 << 11,
    "lighter_ends": 1 << 11,
    "search": _SAMPLES,
}
"""By name; degrees of parallelism and other counts of ranks have that of ``ranks``."""


def check_count(name: str, value: Any, shown: str, least: int = 1) -> None:
    """Raises unless ``value`` is None, or a whole number from ``least`` to the largest one that is planned.

    Args:
        shown: The value as the user wrote it, to begin the message with: ``"--nodes"``, ``"plan(nodes=0)"``.

    Raises:
        DeepSpeedConfigError: It is something else.
    """
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DeepSpeedConfigError(f"{shown}: expected a whole number of {least} or more, found {value!r}")
    largest = LARGEST.get(name, _RANKS)
    if value > largest:
        raise DeepSpeedConfigError(f"{shown}: expected at most {largest:,}, found {value:,}; give a smaller number")
