"""The factor on losses, and the refusal of gradients of a loss without it."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.errors import CallOrderError


class LossScaling:
    """Scales losses, and refuses gradients of an unscaled one."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._scaled = 0  # scaled losses whose backward the program will call itself
        self.saw_unscaled = False  # gradients since the last update came from a loss that was not scaled

    @property
    def factor(self) -> float:
        """The present factor on losses."""
        return 1.0 if self._scaler is None else float(self._scaler.loss_scale)

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss (0-dim) times the scale, for a backward that the engine runs."""
        return self._scaler.scale_loss(loss) if self._scaler is not None else loss

    def apply_for_program(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss (0-dim) times the scale, for a backward that the program calls itself."""
        self._scaled += 1
        return self.apply(loss)

    def program_runs_backward(self) -> None:
        """Records that the program calls a backward itself, and whether its loss was scaled."""
        if self._scaler is not None:
            if self._scaled > 0:
                self._scaled -= 1
            else:
                self.saw_unscaled = True

    def clear(self) -> None:
        """Forgets unscaled losses. Called when their gradients are discarded."""
        self.saw_unscaled = False  # gradients since the last update came from a loss that was not scaled

    def refuse_unscaled(self) -> None:
        """Raises if gradients since the last update came from a loss that was not scaled, and forgets it.

        Raises:
            CallOrderError: A backward of this update began at a loss that was not scaled.
        """
        if self.saw_unscaled:
            self.clear()
            raise CallOrderError(
                "fp16: the gradients come from a loss.backward() whose loss was not scaled; small gradients would have "
                "become zero. Write engine.scale(loss).backward(), or engine.backward(loss)"
            )
        self._scaled = 0
