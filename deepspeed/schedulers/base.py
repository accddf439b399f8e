"""Base class of the schedules: counts steps and writes learning rates to the param groups."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from deepspeed.logging import log_dist

_MOST_NAMED = 5
"""Param groups that a message names."""


class LrSchedule:
    """A learning rate as a function of the number of optimizer steps.

    A plain object, not one of torch's schedulers: its whole state is ``last_batch_iteration``. The engine calls
    :meth:`step` after each optimizer step that was not skipped, so step *i* (from 0) sets the rate of update *i + 1*;
    update 0 runs at the rate that construction writes.

    Args:
        optimizer: A torch optimizer, or anything whose ``optimizer`` attribute is one.
        last_batch_iteration: Step to resume from; -1 is the start.

    Raises:
        TypeError: ``optimizer`` is neither of these.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int = -1) -> None:
        self.optimizer = get_torch_optimizer(optimizer)  # the torch optimizer
        self.last_batch_iteration = last_batch_iteration  # the step whose rate is set; -1 before the first
        self._last_lr: list[float] | None = None

    def get_lr(self) -> list[float]:
        """Returns the rate of each param group at ``last_batch_iteration``."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """Returns the learning rates that were written last.

        Raises:
            AssertionError: None has been written yet, because the schedule resumes from a later step.
        """
        assert self._last_lr is not None, "need to call step() first: no learning rate has been set yet"
        return self._last_lr

    def step(self, iteration: int | None = None) -> None:
        """Advances to the next step, or to step ``iteration``, and writes its learning rates."""
        self.last_batch_iteration = self.last_batch_iteration + 1 if iteration is None else iteration
        self._write(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Returns ``last_batch_iteration``."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores :meth:`state_dict`; the optimizer's rates are part of its own state and stay as they are."""
        self.last_batch_iteration = state_dict["last_batch_iteration"]
        if self.last_batch_iteration >= 0:
            self._last_lr = self.get_lr()

    def _write(self, rates: Sequence[float]) -> None:
        self._last_lr = update_lr(self.optimizer.param_groups, rates)

    def _initial_lrs(self) -> list[float]:
        """Returns each group's rate before any schedule changed it."""
        if self.last_batch_iteration == -1:
            for group in self.optimizer.param_groups:
                group["initial_lr"] = float(group["lr"])
        return [float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups]

    def _rates(
        self, names: tuple[str, str], low: float | Sequence[float], high: float | Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Returns the least and the greatest rate of each param group.

        If the groups have different rates, one number as ``high`` is the greatest rate of those that have the
        optimizer's default rate. The others rise to their own, and begin at the same share of it. The original package
        gives all groups the same rate.

        Args:
            low: Least rate; one number or one per group.
            high: Greatest rate; one number or one per group.
        """
        lows, highs = self._per_group(names[0], low), self._per_group(names[1], high)
        if isinstance(high, list | tuple):
            return lows, highs
        own = self._own_rates()
        for index, rate in own.items():
            highs[index] = rate
            if high and not isinstance(low, list | tuple):
                lows[index] *= rate / float(high)  # type: ignore[arg-type]
        if own:
            self._warn_of_own_rates(
                own, f"rise to them; {names[1]} {high:g} holds for the others. Give {names[1]} as a list to set each"
            )
        return lows, highs

    def _own_rates(self) -> dict[int, float]:
        """Returns, by index, the rates of param groups that are not the optimizer's; empty if all rates are equal."""
        rates = self._initial_lrs()
        default = self.optimizer.defaults.get("lr")
        if len(set(rates)) == 1:
            return {}
        return {index: rate for index, rate in enumerate(rates) if default is None or rate != float(default)}

    def _warn_of_own_rates(self, own: dict[int, float], outcome: str) -> None:
        named = [f"{index} (lr {rate:g})" for index, rate in own.items()]
        more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
        log_dist(
            f"{type(self).__name__}: param groups {', '.join(named[:_MOST_NAMED])}{more} have learning rates of their "
            f"own, and {outcome}",
            level=logging.WARNING,
        )

    def _per_group(self, name: str, value: float | Sequence[float]) -> list[float]:
        num_groups = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [value] * num_groups  # type: ignore[list-item]
        if len(value) != num_groups:
            raise ValueError(
                f"{type(self).__name__}: {name} lists {len(value)} values, but the optimizer has {num_groups} param "
                "groups; give one number, or one per group"
            )
        return list(value)


def get_torch_optimizer(optimizer: Any) -> Optimizer:
    """Returns the torch optimizer in ``optimizer``. Raises TypeError: neither it nor its attribute is one."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, Optimizer):
            return candidate
    raise TypeError(
        f"{type(optimizer).__name__} is not a torch.optim.Optimizer, nor does its attribute 'optimizer' hold one; "
        "give a torch optimizer"
    )


def update_lr(param_groups: list[dict[str, Any]], lrs: Sequence[float]) -> list[float]:
    """Writes one rate per group (into tensors in place, for captured graphs); returns the rates.

    Raises:
        ValueError: The number of groups has changed.
    """
    if len(param_groups) != len(lrs):
        raise ValueError(
            f"the optimizer now has {len(param_groups)} param groups, but the schedule was made for {len(lrs)}; "
            "build the schedule after adding groups"
        )
    for group, lr in zip(param_groups, lrs, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
    return [float(group["lr"]) for group in param_groups]
