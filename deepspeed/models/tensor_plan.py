"""Reads the tensor-parallel plans of Transformers models: patterns of names, each with a style."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


def plans_in(model: nn.Module) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yields ``(name, plan)`` of every outermost module with a plan, where ``*`` matches one component of a name."""
    taken: list[str] = []
    for name, module in model.named_modules():
        if any(name == other or name.startswith(f"{other}.") for other in taken):
            continue
        plan = _plan_of(module) if hasattr(type(module), "_tp_plan") else {}
        if plan:
            taken.append(name)
            yield name, plan


def part_of_plan(model: Any, path: str, prefix: str) -> dict[str, str]:
    """Returns the entries of a model's plan for the module at ``path``, with ``prefix`` in the place of the path."""
    found = {}
    steps = path.split(".")
    for key, style in _plan_of(model).items():
        above, below = key.split(".")[: len(steps)], key.split(".")[len(steps) :]
        if len(above) == len(steps) and all(a in (step, "*") for a, step in zip(above, steps, strict=True)):
            found[".".join((prefix, *below))] = style
    return found


_OF_BLOCKS = ("colwise", "rowwise", "rowwise_split_input")


def cuts_blocks(model: Any) -> bool:
    """Returns whether a model's plan cuts more than embedding and head, or the model is a part of such a one."""
    return getattr(model, "_tp_plan_is_part", False) or any(style in _OF_BLOCKS for style in _plan_of(model).values())


def _plan_of(model: Any) -> Mapping[str, str]:
    return getattr(model, "_tp_plan", None) or {}
