"""What optional features do around the forwards, backwards and updates of one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deepspeed.engine.efficiency import Efficiency

if TYPE_CHECKING:
    from deepspeed.compression.scheduler import compression_scheduler
    from deepspeed.engine.flops import ProfiledStep
    from deepspeed.engine.pacing import EnginePacing


class StepFeatures:
    """Calls the features that take part in a step: curricula, dropping, compression, eigenvalues, the flops profiler.

    Args:
        efficiency: Curricula, layer dropping and token dropping.
        compression: The schedule of a compressed model, or None.
        pacing: Measures eigenvalues for that schedule, or None.
        profiled: The step whose operations are counted, or None.

    Attributes:
        profiled: As given.
    """

    def __init__(
        self,
        efficiency: Efficiency,
        *,
        compression: compression_scheduler | None = None,
        pacing: EnginePacing | None = None,
        profiled: ProfiledStep | None = None,
    ) -> None:
        self.profiled = profiled
        self._efficiency = efficiency
        self._compression = compression
        self._pacing = pacing

    def keywords_of_forward(self, *, is_training: bool, global_steps: int, micro_steps: int) -> dict[str, Any]:
        """Returns the keyword arguments that a forward gets beside those of the program."""
        return self._efficiency.before_forward(
            is_training=is_training, global_steps=global_steps, micro_steps=micro_steps
        )

    @property
    def needs_graph(self) -> bool:
        """Whether :meth:`before_backward` has a use for the loss of an update's last backward."""
        return self._pacing is not None

    @property
    def runs_backward(self) -> bool:
        """Whether the backward that runs now is a feature's, not one of the training."""
        return self._pacing is not None and self._pacing.is_measuring

    def before_backward(self, loss: torch.Tensor, scale: float, global_steps: int) -> None:
        """Measures eigenvalues before the graph of the loss is freed.

        Args:
            loss: 0-dim, as the backward gets it.
            scale: What the program's loss was multiplied by.
            global_steps: Updates so far.
        """
        assert self._pacing is not None
        assert self._compression is not None
        self._pacing.before_backward(loss, scale, global_steps, self._compression.training_steps)

    def before_update(self, global_steps: int, *, has_run_backward: bool) -> None:
        """Prepares compressed layers for an update.

        Raises:
            CallOrderError: The update needs eigenvalues that were not measured.
        """
        if self._compression is None:
            return
        if self._pacing is not None and has_run_backward:
            self._pacing.before_update(global_steps, self._compression.training_steps)
        self._compression.before_update()

    def after_update(self, global_steps: int, *, was_applied: bool) -> None:
        """Moves the schedules on; ``global_steps`` counts the update that has just ended."""
        self._efficiency.at(global_steps)
        if was_applied and self._compression is not None:
            self._compression.step()
