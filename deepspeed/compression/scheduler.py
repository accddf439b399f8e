"""Which techniques act after how many updates."""

from __future__ import annotations

from typing import Any

from torch import nn

from deepspeed.compression.pacing import pace_of
from deepspeed.compression.report import changes, compressed_layers, compression_state
from deepspeed.compression.snip import SnipPruner
from deepspeed.compression.techniques import Techniques
from deepspeed.logging import log_dist


class compression_scheduler:  # noqa: N801 - a published name
    """Switches the techniques of a model on, each at its ``schedule_offset``. The engine has one and advances it.

    Args:
        model: After ``init_compression``.
        compression_config: Not read: the layers have their settings already.

    Attributes:
        training_steps: Updates so far; skipped ones do not count.
        pace: Of widths that fall by eigenvalues; None where all of them fall by the step alone.
    """

    def __init__(self, model: nn.Module, compression_config: Any = None) -> None:
        self._model = model
        self._layers = list(compressed_layers(model))
        self._state = compression_state(model)
        self._marks: list[object] = []
        self._snip = _snip_of(self._layers)
        self.pace = pace_of(model)
        self.training_steps = -1
        self.at(0)

    def before_update(self) -> None:
        """After the last backward and before the update, for techniques that go by gradients. Every rank must call it.

        The engine does so; a loop of one's own needs it for the method ``snip_momentum``.
        """
        if self._snip is not None and not self._snip.plan.is_over(self.training_steps):
            self._snip.look()

    def step(self, step_zero_check: bool = False) -> None:
        """After an update.

        Args:
            step_zero_check: True: no update, only see to it that what acts from the beginning does.
        """
        steps = self.training_steps + (not step_zero_check)
        pruned = None
        if self._snip is not None and not step_zero_check and not self._snip.plan.is_over(self.training_steps):
            pruned = self._snip.after_update(steps)
        self.at(steps)
        if pruned is not None:
            log_dist(pruned)

    def at(self, training_steps: int) -> None:
        """Goes to what acts after so many updates, and says what is new."""
        if training_steps == self.training_steps:
            return
        self.training_steps = training_steps
        if self.pace is not None:
            self.pace.advance(training_steps)
        for module, techniques in self._layers:
            techniques.at(training_steps)
            if techniques.activation_offset is not None:
                quantizer: Any = module.activation_quantizer
                quantizer.is_acting = training_steps >= techniques.activation_offset
        marks: list[object] = [
            (techniques.width and techniques.width.bits, techniques.acting, _is_rounded(module))
            for module, techniques in self._layers
        ]
        if marks == self._marks:
            return
        self._marks, state = marks, compression_state(self._model)
        for line in changes(self._state, state, training_steps):
            log_dist(line)
        self._state = state

    def state_dict(self) -> dict[str, Any] | None:
        """Returns what is no function of the step; None where everything is."""
        return None if self.pace is None else self.pace.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes to a state; :meth:`at` must follow. None: of a run whose widths fell by the step alone."""
        if self.pace is not None:
            self.pace.load_state_dict(state or {})
            self.training_steps = -1


def _snip_of(layers: list[tuple[nn.Module, Techniques]]) -> SnipPruner | None:
    found = [(module, pruning) for module, techniques in layers if (pruning := techniques.prunings.get("sparse"))]
    plan = found[0][1].plan if found else None
    return None if plan is None else SnipPruner(plan, [module for module, _ in found])


def _is_rounded(module: Any) -> bool:
    quantizer = getattr(module, "activation_quantizer", None)
    return quantizer is not None and quantizer.is_acting
