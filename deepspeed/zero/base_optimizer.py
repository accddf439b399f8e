"""The classes that the ecosystem recognises an engine's optimizer by."""

from __future__ import annotations

from typing import Any

import torch


class DeepSpeedOptimizer:
    """What ``deepspeed.initialize`` returns as the optimizer. A plain object, not a torch ``Optimizer``.

    Attributes:
        optimizer: The torch optimizer underneath; its ``param_groups`` are live.
    """

    optimizer: torch.optim.Optimizer

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


class ZeROOptimizer(DeepSpeedOptimizer):
    """An optimizer whose states are placed by a ZeRO stage."""
