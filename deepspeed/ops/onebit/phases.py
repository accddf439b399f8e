"""What an optimizer of the 1-bit family reports to its driver: the phase of an update, and what ranks exchange in it.

These optimizers are not fed with mean gradients alone. After their warm-up each rank adds its *own* gradient to the
momentum that all have, and it is these momenta that are averaged, with one bit for each element. So reducing the
gradients, clipping and updating are not steps one after the other, and ``zero.onebit`` does them in their order.
"""

from __future__ import annotations

import math
import weakref
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from deepspeed.errors import CallOrderError
from deepspeed.logging import logger


class Phase(Enum):
    """Chooses what an update does with the gradients of the ranks."""

    WARM_UP = "warm-up"  #: their mean, as every optimizer gets it
    LOCAL = "local"  #: each rank's own, which stays its own until ranks come together
    MOMENTUM = "momentum"  #: each rank's own, whose momentum is sent in one bit for each element


@runtime_checkable
class ExchangesMomentum(Protocol):
    """An optimizer that exchanges its momentum instead of gradients."""

    phase: Phase
    """Of the update that :meth:`begin_update` announced."""
    precondition: bool
    """Whether what is sent is divided by the root of the variance, bounded, and multiplied by it as it arrives."""
    reminder: PhaseCheck
    """Logs at the end that nothing was compressed, where that is so."""

    def begin_update(self, before: int) -> None:
        """Prepares the phase of the next update.

        Args:
            before: Updates so far, skipped ones included; equal on all ranks, also after a checkpoint was loaded.
        """
        ...

    def coefficient(self, name: str) -> float:
        """Returns the factor on the momentum of a tensor before it is sent; it is divided by it afterwards."""
        ...


def frozen_root(variance: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the root of a variance that is not updated now, infinite where it is 0.

    An element without a gradient during the updates has no scale. Divided by ``eps`` alone, the least momentum would
    move it far away, and signs give every element a momentum. With an infinite divisor it stays where it is.

    Args:
        variance: fp32 or fp64, any shape.
        out: Receives the result; None: a new tensor.
    """
    return torch.sqrt(variance, out=out).masked_fill_(variance == 0, math.inf)


def refuse_step(optimizer: object) -> None:
    """Raises, since these optimizers cannot step without an engine, which has the ranks.

    Raises:
        CallOrderError: Always.
    """
    raise CallOrderError(
        f"{type(optimizer).__name__}.step: this optimizer exchanges momenta between ranks, which the engine does; give "
        "it to deepspeed.initialize and call engine.step()"
    )


def largest_update(betas: tuple[float, float], rate: float = 1.0) -> float:
    """Returns what ``rate * |momentum| / sqrt(variance)`` of Adam never exceeds: 7.27 for betas 0.9 and 0.999.

    Both are sums over past gradients, without correction for their start, and by Cauchy and Schwarz the quotient is at
    most ``(1 - beta1) / sqrt(1 - beta2) / sqrt(1 - beta1 ** 2 / beta2)`` (Adam, arXiv 1412.6980, section 2.1, has the
    simpler bound of a single gradient after zeros). A variance that is frozen bounds nothing: what had small gradients
    until then may get any that is larger.

    Args:
        betas: Decay of the momentum and of the variance.
        rate: Learning rate, or the sum of those of several updates.

    Returns:
        Infinity, also for a rate of 0, where momentum remembers longer than the variance does, ``beta1 ** 2 >= beta2``.
    """
    beta1, beta2 = betas
    if beta1**2 >= beta2:
        return math.inf
    return rate * ((1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)))


_UNCOMPRESSED = (
    "all %d updates were warm-up, so everything was sent uncompressed; compression starts after %d. Lower "
    "freeze_step to 15-25 %% of the run's updates"
)


class PhaseCheck:
    """Logs at the end of a run that it never reached its compression phase.

    Args:
        optimizer: Whose run; the line comes when it is collected, or when the process ends.
        name: What to call it.
        freeze_step: Updates of the warm-up.
        line: The line's text on the number of updates and of ``freeze_step``; None: that nothing was compressed.
    """

    def __init__(self, optimizer: object, name: str, freeze_step: int, line: str | None = None) -> None:
        self._progress: dict[str, Any] = {"updates": 0, "logs": False}
        self._end = weakref.finalize(optimizer, _remind, self._progress, name, freeze_step, line or _UNCOMPRESSED)

    def note(self, updates: int, *, logs: bool) -> None:
        """Records how many updates there were; ``logs``: this rank writes the reminder into its log."""
        self._progress["updates"], self._progress["logs"] = updates, logs

    def __call__(self) -> None:
        """Called when the run is over."""
        self._end()


def _remind(progress: dict[str, Any], name: str, freeze_step: int, line: str) -> None:
    if progress["logs"] and 0 < progress["updates"] <= freeze_step:
        logger.info("%s: %s", name, line % (progress["updates"], freeze_step))


def mask_of(group: dict[str, Any], numel: int, where: str) -> Tensor | None:
    """Returns the group's ``exp_avg_mask``, flat, or None.

    Args:
        group: One of the optimizer's groups.
        numel: Elements that it must have.
        where: For messages.

    Raises:
        ValueError: It has another number of elements.
    """
    mask = group.get("exp_avg_mask")
    if mask is None:
        return None
    if mask.numel() != numel:
        raise ValueError(
            f"exp_avg_mask has {mask.numel()} elements, expected the {numel} of {where}; give each parameter that "
            "needs a mask a group of its own, with a mask in its shape"
        )
    return mask.detach().reshape(-1)
