"""Reaching a part of a model by its dotted name, for programs that replace layers."""

from __future__ import annotations

from typing import Any

from torch import nn


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """The attribute of ``model`` with a dotted name, such as ``"layers.0.weight"``.

    Raises:
        AttributeError: There is none.
    """
    found: Any = model
    for part in module_name.split("."):
        found = getattr(found, part)
    return found


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Puts ``module`` (a module, parameter or value) where the dotted name says.

    Raises:
        AttributeError: What should hold it does not exist.
    """
    holder, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, holder) if holder else model, name, module)
