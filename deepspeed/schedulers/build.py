"""Builds the schedule of a config section: one of this package, or a class of ``torch.optim.lr_scheduler``."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from deepspeed.config.suggest import did_you_mean
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.schedulers.base import LrSchedule, get_torch_optimizer
from deepspeed.schedulers.one_cycle import OneCycle
from deepspeed.schedulers.range_test import LRRangeTest
from deepspeed.schedulers.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

SCHEDULES: dict[str, type[LrSchedule]] = {
    cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}

VALID_LR_SCHEDULES = list(SCHEDULES)


def build_scheduler(name: str, params: dict[str, Any], optimizer: Any) -> Any:
    """Builds the schedule ``name``.

    Args:
        name: A name in :data:`VALID_LR_SCHEDULES` or of a scheduler class in ``torch.optim.lr_scheduler``, in exactly
            this spelling.
        params: Its keyword arguments. A ``warmup_num_steps`` of 0, which integrations pass for "no warm-up", is
            treated as 1.

    Raises:
        DeepSpeedConfigError: The name, a parameter or a value is not supported.
        TypeError: ``optimizer`` is not, and does not contain, a torch optimizer.
    """
    torch_optimizer = get_torch_optimizer(optimizer)
    cls = SCHEDULES.get(name) or _torch_scheduler(name)
    if cls is None:
        known = [*VALID_LR_SCHEDULES, *_torch_names()]
        raise DeepSpeedConfigError(
            f"scheduler.type: {name!r} is unknown{did_you_mean(name, known)}; known are {', '.join(known)}"
        )
    accepted = dict(list(inspect.signature(cls).parameters.items())[1:])  # the first is the optimizer
    problems = [
        f"scheduler.params.{key}: {name} has no such parameter{did_you_mean(key, accepted)}"
        for key in params
        if key not in accepted
    ]
    problems += [
        f"scheduler.params.{key}: {name} needs it; set it"
        for key, parameter in accepted.items()
        if parameter.default is parameter.empty and key not in params
    ]
    if problems:
        raise DeepSpeedConfigError("\n".join(problems), tuple(problems))
    arguments = dict(params)
    if name in SCHEDULES and arguments.get("warmup_num_steps") == 0:
        arguments["warmup_num_steps"] = 1
    try:
        return cls(torch_optimizer, **arguments)
    except (ValueError, TypeError, KeyError, ZeroDivisionError) as error:  # torch's classes raise all of these
        raise DeepSpeedConfigError(f"scheduler: {name} cannot be built from {params}: {error}") from error


def _torch_scheduler(name: str) -> type | None:
    found = getattr(torch.optim.lr_scheduler, name, None)
    is_scheduler = isinstance(found, type) and issubclass(found, torch.optim.lr_scheduler.LRScheduler)
    return found if is_scheduler and name in _torch_names() else None


def _torch_names() -> list[str]:
    module = torch.optim.lr_scheduler
    return [name for name in module.__all__ if name not in ("LRScheduler", "SequentialLR", "ChainedScheduler")]
