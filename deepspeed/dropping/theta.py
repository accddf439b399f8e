"""Progressive layer dropping: the share of layers that stay, as a function of the step (arXiv:2010.13369)."""

from __future__ import annotations

from typing import Any

import numpy


class ProgressiveLayerDrop:
    """The keep ratio theta at each step: it falls from 1 towards ``theta``.

    Args:
        theta: The ratio in the end, between 0 and 1.
        gamma: How fast it falls; 100 / (total steps) is the authors' rule of thumb.

    Attributes:
        theta: As given.
        gamma: As given.
        current_theta: The ratio of the latest update; 1 before the first.
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0

    def get_state(self) -> dict[str, Any]:
        """The keywords that a training forward gets."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """The ratio of the latest update."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Goes to a step: ``(1 - theta) * exp(-gamma * step) + theta``."""
        self.current_theta = float((1.0 - self.theta) * numpy.exp(-self.gamma * global_step) + self.theta)
