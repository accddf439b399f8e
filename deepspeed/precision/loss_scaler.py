"""Scales the loss for fp16, by a static or a dynamic factor.

Small gradients vanish in fp16, so the loss is multiplied by a scale before the backward pass and the gradients are
divided by it before the update (`Micikevicius et al. <https://arxiv.org/abs/1710.03740>`_). The dynamic scale is
halved after overflows and doubled after ``scale_window`` good steps; ``delayed_shift`` (the hysteresis) is the number
of overflows after which it is halved.

The objects have only plain attributes, because they are pickled inside checkpoints.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deepspeed.errors import NonFiniteError

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"

#: Kernels take the scale as fp32, where it must stay finite; torch's scaler has the same limit.
_LARGEST_SCALE = torch.finfo(torch.float32).max


class LossScalerBase:
    """Base class of both scalers: holds the scale (updated if ``dynamic``) and applies it to a loss.

    Raises:
        ValueError: The scale is not positive and finite.
    """

    dynamic = False

    def __init__(self, scale_value: float, dtype: torch.dtype = torch.half) -> None:
        if not (math.isfinite(scale_value) and scale_value > 0):
            raise ValueError(f"loss scale {scale_value}: must be positive and finite; use for example 1024")
        self.cur_scale: float = scale_value
        self.dtype = dtype

    @property
    def loss_scale(self) -> float:
        """The factor that the loss is multiplied by."""
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Returns ``loss`` (a scalar) times the scale, in fp32 or wider: in fp16 the product would overflow."""
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.cur_scale

    def scale_gradient(self, module: Any, grad_in: tuple[Tensor | None, ...], grad_out: Any) -> tuple[Any, ...]:
        """Returns the scaled gradients of a module's inputs, of any shape; a module backward hook."""
        return tuple(None if grad is None else grad * self.cur_scale for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Runs the backward pass of the scaled ``loss`` (a scalar)."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)

    def update_scale(self, overflow: bool) -> None:
        """Updates the scaler after a step. Every rank must pass the same value."""

    def describe_change(self, before: float) -> str:
        """Returns a sentence on how an overflow at scale ``before`` changed the scale."""
        if self.cur_scale != before:
            return f"Loss scale {before:g} -> {self.cur_scale:g}"
        return f"Loss scale stays {before:g}: {self._why_unchanged()}"

    def _why_unchanged(self) -> str:
        return "fp16.loss_scale sets it for the whole run; 0 lets it adapt"

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs."""
        return {"cur_scale": self.cur_scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state that :meth:`state_dict` returned."""
        self.cur_scale = state_dict["cur_scale"]


class LossScaler(LossScalerBase):
    """A scale that never changes."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A scale that follows the gradients.

    An overflow lowers ``cur_hysteresis`` while it is above 1. At 1 it halves the scale, or raises if the scale is at
    ``min_scale``. With ``delayed_shift=1`` and above the minimum, the scale is that of ``torch.amp.GradScaler`` with
    growth 2, backoff 0.5 and ``growth_interval=scale_window``.

    Args:
        scale_window: Number of good steps in a row after which the scale doubles.
        delayed_shift: Number of overflows after which the scale is halved, at least 1.
        consecutive_hysteresis: Every good step resets ``cur_hysteresis``; False: only a full window of good steps does.
        raise_error_at_min_scale: Raise when gradients overflow at the minimum; False: keep skipping steps.
        scale_factor: Factor of growth, and divisor after an overflow; above 1.

    Raises:
        ValueError: A number is out of range.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
        scale_factor: float = 2.0,
    ) -> None:
        super().__init__(init_scale, dtype)
        for name, value in {
            "scale_window": scale_window,
            "min_scale": min_scale,
            "delayed_shift": delayed_shift,
        }.items():
            if not value > 0:
                raise ValueError(f"DynamicLossScaler({name}={value}): must be above 0; raise it")
        if init_scale < min_scale:
            raise ValueError(
                f"DynamicLossScaler(init_scale={init_scale}): must not be below min_scale ({min_scale}); raise "
                "init_scale, or lower min_scale"
            )
        if not scale_factor > 1:
            raise ValueError(f"DynamicLossScaler(scale_factor={scale_factor}): must be above 1; raise it")
        self.cur_iter = 0  # number of steps so far, skipped ones included
        self.last_overflow_iter = -1  # index of the last step that overflowed; -1: none did
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.min_scale = min_scale
        self.delayed_shift = delayed_shift
        self.cur_hysteresis = delayed_shift  # number of overflows after which the scale is divided
        self.consecutive_hysteresis = consecutive_hysteresis
        self.raise_error_at_min_scale = raise_error_at_min_scale

    def update_scale(self, overflow: bool) -> None:
        """Updates the scale after a step; ``overflow`` must be equal on all ranks.

        Raises:
            NonFiniteError: The gradients overflowed with the scale at its minimum and ``cur_hysteresis`` at 1, and
                ``raise_error_at_min_scale`` is set.
        """
        if overflow:
            self._after_overflow()
        else:
            full_window = (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0
            if full_window or self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if full_window and self.cur_scale * self.scale_factor <= _LARGEST_SCALE:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def _after_overflow(self) -> None:
        if self.cur_hysteresis > 1:
            self.cur_hysteresis -= 1
        else:
            if self.cur_scale <= self.min_scale and self.raise_error_at_min_scale:
                raise NonFiniteError(
                    f"step {self.cur_iter}: the gradients overflow although the loss scale is at its minimum "
                    f"({self.cur_scale:g}; last overflow before: {self._last_overflow()}). The run is diverging, or "
                    "fp16 is too narrow for this model: lower the learning rate or set gradient_clipping, use "
                    "bf16.enabled instead of fp16.enabled, or lower fp16.min_loss_scale"
                )
            self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
        self.last_overflow_iter = self.cur_iter

    def _why_unchanged(self) -> str:
        if self.cur_scale <= self.min_scale:
            return "it is at fp16.min_loss_scale"
        return f"fp16.hysteresis is {self.delayed_shift}, so the scale is halved at overflow {self.delayed_shift}"

    def _last_overflow(self) -> str:
        return "none" if self.last_overflow_iter < 0 else f"step {self.last_overflow_iter}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a resumed run needs, without the settings."""
        return {
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
            "last_overflow_iter": self.last_overflow_iter,
            "cur_hysteresis": self.cur_hysteresis,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state; a ``cur_hysteresis`` above the present ``delayed_shift`` is reduced to it."""
        super().load_state_dict(state_dict)
        self.cur_iter = state_dict["cur_iter"]
        self.last_overflow_iter = state_dict["last_overflow_iter"]
        self.cur_hysteresis = min(state_dict["cur_hysteresis"], self.delayed_shift)


def CreateLossScaler(  # noqa: N802 - the public name
    dtype: torch.dtype,
    static_loss_scale: float,
    dynamic_scaling: bool,
    dynamic_loss_args: dict[str, Any] | None,
) -> LossScalerBase:
    """Returns the scaler for a compute dtype: only fp16 is scaled, without ``dynamic_scaling`` by the static scale."""
    if dtype is not torch.half:
        return LossScaler(scale=1.0)
    if not dynamic_scaling:
        return LossScaler(scale=static_loss_scale)
    defaults = {
        INITIAL_LOSS_SCALE: 2.0**16,
        SCALE_WINDOW: 1000,
        MIN_LOSS_SCALE: 1,
        DELAYED_SHIFT: 2,
        CONSECUTIVE_HYSTERESIS: False,
    }
    return DynamicLossScaler(dtype=dtype, **(defaults if dynamic_loss_args is None else dynamic_loss_args))
