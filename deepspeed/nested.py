"""Walks over values of nested tuples, lists and mappings."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


def map_tensors(
    value: Any,
    change: Callable[[Any], Any],
    is_changed: Callable[[Any], bool] = torch.is_tensor,
    *,
    in_dataclasses: bool = False,
) -> Any:
    """Returns ``value`` with ``change`` applied to every tensor in it; containers are rebuilt, the rest stays.

    Args:
        value: Any nesting of tuples (named ones too), lists and mappings, with tensors of any shape.
        change: Called with each tensor; returns what takes its place.
        is_changed: Returns whether ``change`` is called with an object, instead of with every tensor.
        in_dataclasses: Also the fields of dataclasses.
    """
    # No inner function calls itself: in a cycle of references, what ``change`` holds would outlive the call.
    if is_changed(value):
        return change(value)

    def walk(item: Any) -> Any:
        return map_tensors(item, change, is_changed, in_dataclasses=in_dataclasses)

    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(walk, value))
    if isinstance(value, (tuple, list)):
        return type(value)([walk(part) for part in value])
    if in_dataclasses and dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: walk(getattr(value, name)) for name in fields})
    if isinstance(value, Mapping):
        changed = {name: walk(part) for name, part in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return changed
        copied = copy.copy(value)
        for name, part in changed.items():
            copied[name] = part
        return copied
    return value


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists and mappings, in order; one that occurs twice, twice."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict) or isinstance(value, Mapping):  # the first is quick
        for item in value.values():
            yield from tensors_of(item)
