"""The loss scale of fp16 on a loss, and the loss that was forgotten to be scaled."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.errors import CallOrderError


class LossScaling:
    """Scales losses, and sees to it that no gradients of an unscaled one are used.

    Args:
        scaler: The fp16 loss scaler, or None where losses are not scaled.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._scaled = 0  # losses whose backward the program calls itself and that have not run yet
        self._saw_unscaled = False

    @property
    def factor(self) -> float:
        """The present factor on losses."""
        return 1.0 if self._scaler is None else float(self._scaler.loss_scale)

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss (0-dim) times the scale, for a backward of the engine's."""
        return self._scaler.scale_loss(loss) if self._scaler is not None else loss

    def apply_for_program(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss (0-dim) times the scale, for a backward that the program calls itself."""
        self._scaled += 1
        return self.apply(loss)

    def program_runs_backward(self) -> None:
        """A backward begins that the program has called itself."""
        if self._scaler is not None:
            if self._scaled > 0:
                self._scaled -= 1
            else:
                self._saw_unscaled = True

    @property
    def saw_unscaled(self) -> bool:
        """Returns whether the gradients that wait for the update come from a loss without the scale."""
        return self._saw_unscaled

    def refuse_unscaled(self) -> None:
        """Raises where :attr:`saw_unscaled`, once: the gradients are to be thrown away before."""
        if self._saw_unscaled:
            self._saw_unscaled = False
            raise CallOrderError(
                "fp16: the gradients come from a loss.backward() whose loss was not scaled; small gradients would have "
                "become zero. Write engine.scale(loss).backward(), or engine.backward(loss)"
            )
        self._scaled = 0
