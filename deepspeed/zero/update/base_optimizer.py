"""Base classes of engines' optimizers, for which programs test with ``isinstance``."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.errors import CallOrderError


class DeepSpeedOptimizer:
    """Base class of what ``deepspeed.initialize`` returns as the optimizer; not a torch ``Optimizer``."""

    optimizer: torch.optim.Optimizer  # the torch optimizer underneath; its ``param_groups`` are live

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the torch optimizer; writing ``lr`` here takes effect."""
        return self.optimizer.param_groups

    @property
    def state(self) -> dict[Any, Any]:
        """The state of the torch optimizer, by run."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the torch optimizer."""
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises; see :func:`refuse_changed_groups`.

        Raises:
            CallOrderError: Always.
        """
        raise CallOrderError(f"optimizer.add_param_group: {_REMEDY}")


def refuse_changed_groups(optimizer: torch.optim.Optimizer, runs: int) -> None:
    """Raises if parameters were added to a group or taken from it, or if a group with parameters was added.

    Args:
        runs: Number of this rank's runs, which are all that its groups may list.

    Raises:
        CallOrderError: The groups list something else, which would never be trained.
    """
    found = [len(group["params"]) for group in optimizer.param_groups]
    if sum(found) != runs:
        raise CallOrderError(
            f"engine.step: the {len(found)} param groups of {type(optimizer).__name__} list {sum(found)} "
            f"tensors, but this rank trains {runs}: a group's `params` were changed, or add_param_group was "
            f"called. {_REMEDY}"
        )


_REMEDY = (
    "deepspeed.initialize fixes which parameters belong to which group; the other entries of a group, such as "
    "lr, may change. Give the optimizer all parameters before initialize: those that train later with "
    "requires_grad=False until then, which costs no optimizer state"
)


class ZeROOptimizer(DeepSpeedOptimizer):
    """An optimizer whose states are placed by a ZeRO stage."""
