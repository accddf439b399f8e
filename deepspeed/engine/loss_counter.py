"""Losses that are sums over tokens: what they are divided by, which is known at the update only.

A mean over the tokens of an update cannot be computed micro-batch by micro-batch: each has its own number of tokens,
on each rank. So the gradients of the sums are added up, and the update divides them once by the tokens of all ranks and
micro-batches. Before that they are divided by a power of two near that number, equal on all ranks, so that 16-bit
gradients stay in range; dividing by it changes no digit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.zero.update.optimizer import DeepSpeedZeroOptimizer, StepReport


class LossCounter:
    """Counts the tokens (or samples) of the losses of one update.

    Args:
        updater: Makes the updates; None where nothing is trained.
    """

    def __init__(self, updater: DeepSpeedZeroOptimizer | None) -> None:
        self._updater = updater
        if updater is not None:
            updater.attach_losses(self.update, self.clear)
        self._mine = 0.0
        self._scale = 0.0  # the power of two; 0 before it is known
        self._is_counted: bool | None = None  # of the losses since the last update

    def begin(self, count: float | None, micro_batches: int) -> float:
        """Called before the backward of a loss. Every rank must call it alike.

        Args:
            count: Tokens in this rank's loss, as :func:`number_of` returns them; None: the loss is a mean.
            micro_batches: Of an update.

        Returns:
            What the loss is to be divided by before its backward; 1 without a count.

        Raises:
            CallOrderError: Some losses of an update are sums with a count, and others are means.
        """
        if self._is_counted not in (None, count is not None):
            raise CallOrderError(
                "engine.backward(loss, count=...): some losses since the last update have a count, and others have "
                "none; give every one a count (its loss is then a sum), or none (means). engine.zero_grad() begins anew"
            )
        self._is_counted = count is not None
        if count is None:
            return 1.0
        if not self._scale:
            assert self._updater is not None
            counts = self._updater.gather_over_job(count, "the tokens of the first loss")
            self._scale = _near(float(counts.mean()) * micro_batches)
        return self._scale

    def add(self, count: float) -> None:
        """Adds the tokens of a loss whose backward has ended; one that an exception ended leaves no gradient."""
        self._mine += count

    def update(self, extra: Sequence[float] = ()) -> StepReport:
        """Makes the update, which divides by the tokens of all ranks. Every rank must call it.

        Args:
            extra: See :meth:`DeepSpeedZeroOptimizer.update`.

        Returns:
            The report of the update; where losses have a count, the last of its ``extra`` numbers is the count.
        """
        assert self._updater is not None
        if not self._is_counted:
            report = self._updater.update(extra)
            self.clear()
            return report
        report = self._updater.update((*extra, self._mine), lambda rows: self._divisor(rows[:, -1]))
        self._end_update(report.extra[:, -1])
        return report

    def _divisor(self, counts: torch.Tensor) -> float:
        """Returns what the mean gradient of the divided sums is to be divided by.

        Args:
            counts: Of every rank of the job, 1-D, fp64.
        """
        assert self._updater is not None
        total = float(counts.sum()) / self._updater.copies
        if not total:
            return 1.0  # every gradient is zero
        return total / (self._scale * self._updater.mean_over)

    def _end_update(self, counts: torch.Tensor) -> None:
        """Begins anew after an update, with the power of two that fits it.

        Args:
            counts: As for :meth:`_divisor`.
        """
        assert self._updater is not None
        if mean := float(counts.mean()):
            fitting = _near(mean)
            if fitting != self._scale:
                self._updater.scale_feedback(self._scale / fitting)
                self._scale = fitting
        self.clear()

    def clear(self) -> None:
        """Forgets the losses since the last update. Called whenever their gradients are thrown away."""
        self._mine, self._is_counted = 0.0, None


def _near(value: float) -> float:
    """Returns the power of two near a positive number; 1 for smaller ones."""
    return 2.0 ** round(math.log2(value)) if value > 1 else 1.0


def number_of(count: Any) -> float:
    """Returns a count as a number; of a tensor on a device that waits for the device.

    Args:
        count: A number, or a tensor of one element.

    Raises:
        DeepSpeedConfigError: It is no finite number, or negative.
    """
    number = float(count) if isinstance(count, (int, float, torch.Tensor)) else math.nan
    if not (number >= 0 and math.isfinite(number)):
        raise DeepSpeedConfigError(
            f"engine.backward(count={count!r}): expected the number of tokens in this rank's loss, 0 or more"
        )
    return number
