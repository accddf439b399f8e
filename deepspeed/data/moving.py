"""Moving nested batches to a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def move_to_device(
    item: Any, device: torch.device | str | int, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Moves what is movable in ``item`` to ``device``.

    Args:
        item: A tensor (anything with ``to``), or tuples, lists and mappings of such; other things pass through.
        device: Where to.
        criterion_func: Moves only what it says True to; None: everything with ``to``.

    Returns:
        The same structure with the moved parts. What is there already is not copied.
    """
    movable = hasattr(item, "to") if criterion_func is None else criterion_func(item)
    if movable:
        return item.to(device)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*(move_to_device(part, device, criterion_func) for part in item))
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(part, device, criterion_func) for part in item)
    if isinstance(item, Mapping):
        return {name: move_to_device(part, device, criterion_func) for name, part in item.items()}
    return item
