"""Reaching a part of a model by its dotted name, for programs that replace layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Returns the attribute of ``model`` with a dotted name, such as ``"layers.0.weight"``.

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
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


def convert_conv1d_to_linear(model: nn.Module, convert_type: type[nn.Module]) -> nn.Module:
    """Replaces transformers' ``Conv1D`` layers by ``nn.Linear`` with the transposed weight, in place.

    Compression knows ``Conv1D`` itself; this is for programs that want linear layers.

    Args:
        model: The model, or one with an attribute ``module``.
        convert_type: The class ``Conv1D``.

    Returns:
        ``model``.
    """
    inner = model.module if isinstance(getattr(model, "module", None), nn.Module) else model
    assert isinstance(inner, nn.Module)
    for name, module in list(inner.named_modules()):
        if name and type(module) is convert_type:
            old: Any = module
            with torch.device("meta"):
                rows, columns = old.weight.shape
                linear = nn.Linear(rows, columns, old.bias is not None)
            linear.weight = nn.Parameter(old.weight.detach().t().contiguous(), old.weight.requires_grad)
            linear.bias = old.bias
            inner.set_submodule(name, linear.train(old.training))
    return model
