"""A learning rate that keeps growing, to find in one run which rates work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from deepspeed.schedulers.base import LrSchedule


class LRRangeTest(LrSchedule):
    """Grows the learning rate linearly without end (`Smith <https://arxiv.org/abs/1803.09820>`_).

    At step *i* (from 0) it is ``min_lr * (1 + step_rate * (i + 1) / step_size)``.

    Args:
        lr_range_test_min_lr: Rate at the start; one number or one per group.
        lr_range_test_step_size: Steps per unit of growth, positive.
        lr_range_test_step_rate: Growth per unit.
        lr_range_test_staircase: Grow only at whole units.

    Raises:
        ValueError: The step size is no positive integer, or a list has another length than the groups.
        TypeError: There is no torch optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        size = lr_range_test_step_size
        if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
            raise ValueError(f"LRRangeTest: lr_range_test_step_size must be a positive integer, but is {size!r}")
        self.min_lr = self._per_group("lr_range_test_min_lr", lr_range_test_min_lr)
        if not isinstance(lr_range_test_min_lr, list | tuple) and (own := self._own_rates()):
            self._warn_of_own_rates(
                own, "lose them: all groups are tested at one rate. Give lr_range_test_min_lr as a list to set each"
            )
        self.step_size = size
        self.step_rate = lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._write(self.min_lr)

    def get_lr(self) -> list[float]:
        """Returns the rate of each param group at the present step."""
        units = (self.last_batch_iteration + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(units) if self.staircase else units)
        return [lr * growth for lr in self.min_lr]
