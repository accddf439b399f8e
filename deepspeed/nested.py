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

    def walk(item: Any) -> Any:
        if is_changed(item):
            return change(item)
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*map(walk, item))
        if isinstance(item, (tuple, list)):
            return type(item)([walk(part) for part in item])
        if in_dataclasses and dataclasses.is_dataclass(item) and not isinstance(item, type):
            fields = [field.name for field in dataclasses.fields(item) if field.init]
            return dataclasses.replace(item, **{name: walk(getattr(item, name)) for name in fields})
        if isinstance(item, Mapping):
            changed = {name: walk(part) for name, part in item.items()}
            if type(item) is dict or not isinstance(item, MutableMapping):
                return changed
            copied = copy.copy(item)
            for name, part in changed.items():
                copied[name] = part
            return copied
        return item

    return walk(value)


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
