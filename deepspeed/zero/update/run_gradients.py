"""What a program sees in ``.grad`` of the tensors that a torch optimizer's groups list: the runs of masters.

A run is a flat piece of several parameters, whose gradient only the update gives it. So a program that clips or clears
the gradients of ``optimizer.param_groups`` would do nothing, in silence; here it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed.errors import CallOrderError
from deepspeed.zero.gradient.pending_gradient import REMEDY, PendingGradient
from deepspeed.zero.update.masters import MasterBucket


class MasterRunGradients:
    """Puts a :class:`PendingGradient` that refuses everything into ``.grad`` of each run."""

    def __init__(self, masters: Sequence[MasterBucket]) -> None:
        self.is_accumulated = False  # always False: autograd does not reach runs
        self._masters = masters
        self._shown: list[tuple[torch.Tensor, PendingGradient]] = []

    @property
    def name(self) -> str:
        """Returns what messages call a run."""
        return "optimizer.param_groups"

    def show(self) -> None:
        """Puts them into ``.grad``. Called after a backward."""
        if self._shown:
            return
        for master in self._masters:
            for run in master.runs:
                handle = PendingGradient(self, run.param.data)
                run.param.grad = handle
                self._shown.append((run.param, handle))

    def hide(self) -> None:
        """Takes them out of ``.grad``."""
        for param, handle in self._shown:
            if param.grad is handle:
                param.grad = None
        self._shown.clear()

    def check(self) -> None:
        """Raises if the program has set ``.grad`` of a run.

        Raises:
            CallOrderError: It has.
        """
        if any(param.grad is not handle for param, handle in self._shown):
            self.hide()
            raise CallOrderError(self._refusal("an assignment to .grad"))

    def _refusal(self, operation: str) -> str:
        if "non_finite_check_and_unscale" in operation:
            return (
                "torch.amp.GradScaler in optimizer.param_groups: an engine scales losses itself. Leave the scaler out "
                "and set fp16.enabled in the configuration, or bf16.enabled, which needs none"
            )
        return (
            f"{operation} in optimizer.param_groups: since deepspeed.initialize these groups list flat pieces of the "
            "engine's fp32 masters, which get gradients only inside engine.step(). Use the parameters of the model "
            f"instead (optimizer.zero_grad() works). {REMEDY}"
        )

    def whole(self) -> torch.Tensor | str:
        """Returns why there are no values."""
        return self._refusal("an operation")

    def read(self, operation: str) -> torch.Tensor:
        """Raises ``CallOrderError``."""
        raise CallOrderError(self._refusal(operation))

    def write(self, _value: torch.Tensor) -> None:
        """Raises ``CallOrderError``."""
        raise CallOrderError(self._refusal("a write"))

    def change(self, _operation: Callable[[torch.Tensor], Any]) -> None:
        """Raises ``CallOrderError``."""
        raise CallOrderError(self._refusal("a change"))

    def add(self, _other: torch.Tensor) -> None:
        """Raises ``CallOrderError``."""
        raise CallOrderError(self._refusal("an addition"))

    def refuse_addition(self) -> None:
        """Raises ``CallOrderError``."""
        raise CallOrderError(self._refusal("an addition"))
