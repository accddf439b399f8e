"""Reads the degrees of parallelism from the configuration, and computes the data-parallel size."""

from __future__ import annotations

import math
from typing import Any

from deepspeed.axes import EXPERT, KEYS, PIPE, ROWS, SAME_PART, SAMPLES
from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError


def degrees(root: Root) -> dict[str, int]:
    """Returns the size that the configuration requests along each axis of ``axes.KEYS``; 1 where it requests none."""
    return {axis: _value(root, *key.split(".")) for axis, key in KEYS.items()}


def _value(section: Any, *path: str) -> int:
    for name in path[:-1]:
        section = getattr(section, name)
        if section is None or not getattr(section, "enabled", True):
            return 1
    return max(getattr(section, path[-1]), 1)


def data_parallel_size(root: Root, world_size: int, *, stages: int = 1) -> int:
    """Returns the number of ranks that see other samples: ``world_size / (tensor x sequence x stages)``.

    Experts are spread over ranks that hold the same part of the rest of the model (data x sequence), as Megatron-LM
    folds them, so expert parallelism does not reduce their number.

    Raises:
        DeepSpeedConfigError: The degrees do not divide ``world_size``, or the expert degree does not divide the ranks
            that the others leave.
    """
    wanted = {**degrees(root), PIPE: stages}
    sizes = {row.key or row.counts: wanted[row.name] for row in ROWS if row.name in wanted and row.name not in SAMPLES}
    others = math.prod(sizes.values())
    if world_size % others:
        named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise DeepSpeedConfigError(
            f"{named} takes groups of {others} ranks, which do not divide the {world_size} ranks of the job; start a "
            f"multiple of {others}, or lower a degree"
        )
    found = world_size // others
    same = found * math.prod(wanted.get(axis, 1) for axis in SAME_PART if axis not in SAMPLES)
    if same % wanted[EXPERT]:
        raise DeepSpeedConfigError(
            f"{KEYS[EXPERT]} {wanted[EXPERT]}: experts are spread over ranks that see other samples or other parts "
            f"of sequences, of which there are {same}; choose a divisor of {same}"
        )
    return found
