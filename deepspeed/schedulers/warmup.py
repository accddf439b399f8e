"""Learning-rate schedules: a warm-up, then a constant rate, linear decay or cosine decay.

With *i* the step, *W* = max(2, ``warmup_num_steps``) and *T* = ``total_num_steps``, the rise is i/W (linear) or
ln(i + 1)/ln(W) (log).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from deepspeed.logging import log_dist
from deepspeed.schedulers.base import LrSchedule

WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"


class _RisingSchedule(LrSchedule):
    """Base class with the warm-up."""

    def __init__(self, optimizer: Any, warmup_num_steps: int, warmup_type: str, last_batch_iteration: int) -> None:
        super().__init__(optimizer, last_batch_iteration)
        name = type(self).__name__
        if isinstance(warmup_num_steps, bool) or not isinstance(warmup_num_steps, int) or warmup_num_steps <= 0:
            raise ValueError(f"{name}: warmup_num_steps must be a positive integer, but is {warmup_num_steps!r}")
        if warmup_type not in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
            log_dist(
                f"{name}: warmup_type {warmup_type!r} is neither 'log' nor 'linear'; using 'log'", level=logging.WARNING
            )
            warmup_type = WARMUP_LOG_RATE
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type

    @property
    def is_rising(self) -> bool:
        """Whether the present step belongs to the rise."""
        return self.last_batch_iteration < self.warmup_num_steps

    def _risen(self) -> float:
        """Returns the completed fraction of the warm-up, 0 to 1; 0 before the first step."""
        iteration = max(0, self.last_batch_iteration)
        if self.warmup_type == WARMUP_LINEAR_RATE:
            return iteration / self.warmup_num_steps
        return math.log(iteration + 1) / math.log(self.warmup_num_steps)

    def _warn_if_shorter(self, total_num_steps: int) -> None:
        if total_num_steps < self.warmup_num_steps:
            log_dist(
                f"{type(self).__name__}: total_num_steps {total_num_steps} is less than warmup_num_steps "
                f"{self.warmup_num_steps}, so the learning rate never reaches its maximum. Raise total_num_steps, or "
                "lower warmup_num_steps",
                level=logging.WARNING,
            )


class WarmupLR(_RisingSchedule):
    """Rises from the least to the greatest rate, then stays.

    Args:
        warmup_min_lr: Rate at the start; one number or one per group.
        warmup_max_lr: Rate after the rise; None is each group's own. One number leaves groups their own rates, where
            these differ from the optimizer's.
        warmup_num_steps: Steps of the rise, positive; at least 2 are made.
        warmup_type: ``log`` or ``linear``; anything else is ``log`` with a warning.

    Raises:
        ValueError: ``warmup_num_steps`` is no positive integer, or a list has another length than the groups.
        TypeError: There is no torch optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        highest = self._initial_lrs() if warmup_max_lr is None else warmup_max_lr
        self.min_lrs, self.max_lrs = self._rates(("warmup_min_lr", "warmup_max_lr"), warmup_min_lr, highest)
        if last_batch_iteration == -1:
            self._write(self.min_lrs)

    def get_lr(self) -> list[float]:
        """Returns the rate of each param group at the present step."""
        share = self._risen() if self.is_rising else self._after_rise()
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after_rise(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Rises like :class:`WarmupLR`, then falls linearly, reaching the least rate at ``total_num_steps``.

    Raises:
        ValueError: ``warmup_num_steps`` is no positive integer, or a list has another length than the groups.
        TypeError: There is no torch optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        self._warn_if_shorter(total_num_steps)

    def _after_rise(self) -> float:
        fall = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - self.last_batch_iteration) / fall)


class WarmupCosineLR(_RisingSchedule):
    """Rises, then falls along half a cosine, as ratios of each group's own rate. The first update runs at rate 0.

    Args:
        warmup_min_ratio: Share of the rate at which the rise starts.
        cos_min_ratio: Share of the rate at the end.

    Raises:
        ValueError: ``warmup_num_steps`` is no positive integer.
        TypeError: There is no torch optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = self._initial_lrs()
        self._warn_if_shorter(total_num_steps)
        if last_batch_iteration == -1:
            self._write([0.0] * len(self.org_lrs))

    def get_lr_ratio(self) -> float:
        """Returns the factor on every group's rate at the present step."""
        if self.last_batch_iteration < 0:
            return 0.0
        if self.is_rising:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * self._risen()
        fall = max(1, self.total_num_steps - self.warmup_num_steps)
        progress = min(1.0, (self.last_batch_iteration - self.warmup_num_steps + 1) / fall)
        return self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2

    def get_lr(self) -> list[float]:
        """Returns the rate of each param group at the present step."""
        ratio = self.get_lr_ratio()
        return [lr * ratio for lr in self.org_lrs]
