"""Rules that make tensors of other names, shapes or values; those of PEFT and of Transformers come in this form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TensorRule:
    """Makes tensors of other names, shapes or values from those that it takes together."""

    inputs: tuple[str, ...]  # names of the tensors that it takes
    # returns the new tensors by name; changes no tensor, may take some out of the dict so that they are freed, and
    # takes tensors without values (``meta``) for the shapes
    convert: Callable[[Tensors], Tensors]


def renamings(names: Iterable[str], new_names: Mapping[str, str]) -> list[TensorRule]:
    """Returns conversions that rename; a name that is not in ``new_names`` is left out."""
    return [TensorRule((name,), _renaming(name, new_names.get(name))) for name in names if new_names.get(name) != name]


def _renaming(name: str, new: str | None) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {} if new is None else {new: tensors[name]}


def rename_beginnings(beginnings: Mapping[str, str], names: Iterable[str]) -> list[TensorRule]:
    """Returns conversions that replace the beginnings of names; a name with none of them stays as it is."""
    new_names = {}
    for name in names:
        old = next((old for old in beginnings if name.startswith(old)), "")
        new_names[name] = beginnings.get(old, "") + name.removeprefix(old)
    return renamings(new_names, new_names)
