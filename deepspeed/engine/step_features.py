"""What features do around the forwards, backwards and updates of one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deepspeed.engine_feature import EngineHooks

if TYPE_CHECKING:
    from deepspeed.engine.flops import ProfiledStep


class StepFeatures:
    """Calls the features that take part in a step, and the flops profiler.

    Args:
        hooks: Of the features.
        profiled: The step whose operations are counted, or None.

    Attributes:
        profiled: As given.
    """

    def __init__(self, hooks: EngineHooks, *, profiled: ProfiledStep | None = None) -> None:
        self.profiled = profiled
        self._hooks = hooks

    def keywords_of_forward(self, *, is_training: bool, global_steps: int, micro_steps: int) -> dict[str, Any]:
        """Returns the keyword arguments that a forward gets beside those of the program."""
        return self._hooks.before_forward(is_training=is_training, global_steps=global_steps, micro_steps=micro_steps)

    @property
    def needs_graph(self) -> bool:
        """Returns whether :meth:`before_backward` has a use for the loss of an update's last backward."""
        return self._hooks.needs_graph

    @property
    def runs_backward(self) -> bool:
        """Returns whether the backward that runs now is a feature's, not one of the training."""
        return self._hooks.runs_backward

    def before_backward(self, loss: torch.Tensor, scale: float, global_steps: int) -> None:
        """Lets features look at a loss before its graph is freed.

        Args:
            loss: 0-dim, as the backward gets it.
            scale: What the program's loss was multiplied by.
            global_steps: Updates so far.
        """
        self._hooks.before_backward(loss, scale, global_steps)

    def before_update(self, global_steps: int, *, has_run_backward: bool) -> None:
        """Prepares features for an update.

        Raises:
            CallOrderError: The update needs eigenvalues that were not measured.
        """
        self._hooks.before_update(global_steps, has_run_backward=has_run_backward)

    def after_update(self, global_steps: int, *, was_applied: bool) -> None:
        """Moves the schedules on; ``global_steps`` counts the update that has just ended."""
        self._hooks.after_update(global_steps, was_skipped=not was_applied)
