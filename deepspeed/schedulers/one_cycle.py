"""The 1-cycle policy: up, down, then a slow decay; the momentum goes the other way."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from deepspeed.logging import log_dist
from deepspeed.schedulers.base import LrSchedule

#: The second beta while the first one cycles.
_SECOND_BETA = 0.99


class OneCycle(LrSchedule):
    """One cycle of rate and momentum (`Smith <https://arxiv.org/abs/1803.09820>`_).

    The rate rises linearly from least to greatest over the first half of the cycle and falls back over the second.
    After *n* further steps it is ``cycle_min_lr / (1 + decay_lr_rate * n / decay_step_size)``. The first beta falls
    from greatest to least momentum and rises again, then grows by the same kind of factor; the second is 0.99.

    Args:
        cycle_min_lr: Rate at the ends of the cycle; one number or one per group.
        cycle_max_lr: Rate in the middle. One number leaves groups their own rates, where these differ from the
            optimizer's.
        decay_lr_rate: Decay of the rate after the cycle.
        cycle_first_step_size: Steps up, positive.
        cycle_second_step_size: Steps down; None: as many.
        cycle_first_stair_count: Number of stairs on the way up; 0 is smooth.
        cycle_second_stair_count: Number of stairs on the way down; None: as many.
        decay_step_size: Steps per unit of decay; 0 is no decay.
        cycle_momentum: Move the momentum too. Needs groups with ``betas``; others are left alone, with a warning.
        cycle_min_mom: Momentum in the middle; one number or one per group.
        decay_mom_rate: Growth of the momentum after the cycle.

    Raises:
        ValueError: A number of steps is out of range, or a list has another length than the groups.
        TypeError: There is no torch optimizer.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if not cycle_first_step_size > 0:
            raise ValueError(f"OneCycle: cycle_first_step_size must be above 0, but is {cycle_first_step_size}")
        for name, value in {
            "cycle_second_step_size": cycle_second_step_size,
            "cycle_first_stair_count": cycle_first_stair_count,
            "cycle_second_stair_count": cycle_second_stair_count,
            "decay_step_size": decay_step_size,
        }.items():
            if value is not None and value < 0:
                raise ValueError(f"OneCycle: {name} must not be negative, but is {value}")
        self.first_step_size = cycle_first_step_size
        self.second_step_size = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        self.first_stair_count = cycle_first_stair_count
        self.second_stair_count = (
            cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        )
        self.total_size = self.first_step_size + self.second_step_size
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs, self.max_lrs = self._rates(("cycle_min_lr", "cycle_max_lr"), cycle_min_lr, cycle_max_lr)
        self.min_moms = self._per_group("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._per_group("cycle_max_mom", cycle_max_mom)
        self.cycle_momentum = cycle_momentum and self._has_betas()
        if last_batch_iteration == -1:
            self._write(self.min_lrs)
            self._write_momentum()

    def _has_betas(self) -> bool:
        if all("betas" in group for group in self.optimizer.param_groups):
            return True
        log_dist(
            f"OneCycle: cycle_momentum has no effect, because {type(self.optimizer).__name__} has no betas; "
            "set cycle_momentum to false",
            level=logging.WARNING,
        )
        return False

    def step(self, iteration: int | None = None) -> None:
        """Goes to the next step, or to step ``iteration``, and writes its rates and momenta."""
        super().step(iteration)
        self._write_momentum()

    def get_lr(self) -> list[float]:
        """Returns the rate of each param group at the present step."""
        steps_after = self._steps_after_cycle()
        if steps_after:
            factor = 1 + self.decay_lr_rate * self._decay_units(steps_after)
            return [low / factor for low in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Returns the betas of each param group at the present step; None if the momentum does not move."""
        if not self.cycle_momentum:
            return None
        steps_after = self._steps_after_cycle()
        if steps_after:
            factor = 1 + self.decay_mom_rate * self._decay_units(steps_after)
            return [(high * factor, _SECOND_BETA) for high in self.max_moms]
        height = self._height()
        return [
            (high - (high - low) * height, _SECOND_BETA) for low, high in zip(self.min_moms, self.max_moms, strict=True)
        ]

    def _write_momentum(self) -> None:
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def _steps_after_cycle(self) -> int:
        return max(0, self.last_batch_iteration + 1 - self.total_size)

    def _decay_units(self, steps: int) -> float:
        return steps / self.decay_step_size if self.decay_step_size else 0.0

    def _height(self) -> float:
        """Returns the height within the cycle, 0 to 1.

        With stairs, the height is rounded down to a stair on the way up, and up to one on the way down.
        """
        position = self.last_batch_iteration + 1
        if position <= self.first_step_size:
            size, count = self.first_step_size, self.first_stair_count
            # Multiplied first: 29 / 100 * 100 is below 29 in floating point, which would be another stair.
            return math.floor(position * count / size) / count if count else position / size
        left, size, count = self.total_size - position, self.second_step_size, self.second_stair_count
        return math.ceil(left * count / size) / count if count else left / size
