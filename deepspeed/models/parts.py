"""Takes single modules out of a Transformers model, or builds them one by one from a model without values."""

from __future__ import annotations

import copy
from typing import Any

import torch

from deepspeed.models.tensor_plan import cuts_blocks, part_of_plan


class ModelPart:
    """A module of a model by its path, which can be taken from the model or built.

    Args:
        skeleton: The model, with values or without.
        model: The model whose modules are used as they are; None: they are built one by one.

    Attributes:
        name: Prefix of the names of its parameters: the path and a dot; empty for the whole model.
    """

    def __init__(self, skeleton: Any, model: Any, path: str) -> None:
        self.skeleton, self.path = skeleton, path
        self.name = f"{path}." if path else ""
        self._model = model

    def inside(self, name: str) -> ModelPart:
        """Returns the part for the submodule ``name`` of this one."""
        return ModelPart(self.skeleton, self._model, f"{self.name}{name}")

    def original(self) -> Any:
        """Returns the module in the model, with values or without."""
        return (self._model if self._model is not None else self.skeleton).get_submodule(self.path)

    def get(self) -> Any:
        """Returns the model's own module, or a new one on the CPU with initial values; on ``meta`` without values."""
        if self._model is not None:
            return self._model.get_submodule(self.path)
        module: Any = copy.deepcopy(self.skeleton.get_submodule(self.path))
        if torch.get_default_device().type == "meta":
            return module
        module = module.to_empty(device="cpu")
        for owner in module.modules():  # the constructors compute the buffers
            if getattr(owner, "config", None) is not None and any(True for _ in owner.buffers(recurse=False)):
                fresh = type(owner)(owner.config)
                for name, value in fresh.named_buffers(recurse=False):
                    getattr(owner, name).copy_(value)
        for inner in module.modules():
            self.skeleton._init_weights(inner)
        return module

    def tensor_plan(self, prefix: str) -> dict[str, str]:
        """Returns the entries of the model's tensor-parallel plan for this part, by names that begin with ``prefix``.

        Empty if the plan cuts no block, for example because only the head has an entry.
        """
        return part_of_plan(self.skeleton, self.path, prefix) if cuts_blocks(self.skeleton) else {}
