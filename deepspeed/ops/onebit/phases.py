"""The interface between an optimizer of the 1-bit family and its driver: the phases of updates.

After the warm-up, gradients are not averaged. Each rank adds its *own* gradient to the common momentum, and these
momenta are averaged with one bit per element. So the usual sequence (reduce gradients, clip, update) does not apply;
``zero.onebit`` implements the sequence of these optimizers.
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
    """Which gradient an update uses, and what ranks exchange."""

    WARM_UP = "warm-up"  #: the mean gradient, as in other optimizers
    LOCAL = "local"  #: each rank's own gradient; ranks exchange their movements only in some updates
    MOMENTUM = "momentum"  #: each rank's own gradient; momenta are sent with one bit per element


@runtime_checkable
class ExchangesMomentum(Protocol):
    """An optimizer that exchanges its momentum instead of gradients."""

    phase: Phase
    """Phase of the update that :meth:`begin_update` has prepared."""
    precondition: bool
    """Whether momenta are divided by the root of the variance and clamped before sending, see ``OneBitAdam``."""
    reminder: PhaseCheck
    """Logs at the end of the run if nothing was compressed."""

    def begin_update(self, before: int) -> None:
        """Prepares the next update's phase. ``before``: updates so far, skipped ones too, equal on all ranks."""
        ...

    def coefficient(self, name: str) -> float:
        """Returns the factor on the momentum of a tensor before it is sent; it is divided by it afterwards."""
        ...


def frozen_root(variance: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the root of a variance (any shape) that is not updated, infinite where it is 0; in ``out`` if given.

    An element without a gradient in the warm-up has a variance of 0. Divided by ``eps`` alone, the smallest momentum
    would give it a huge update, and one-bit codes give every element a momentum. An infinite divisor keeps it constant.
    """
    return torch.sqrt(variance, out=out).masked_fill_(variance == 0, math.inf)


def refuse_step(optimizer: object) -> None:
    """Raises CallOrderError, because these optimizers need an engine to step."""
    raise CallOrderError(
        f"{type(optimizer).__name__}.step: this optimizer exchanges momenta between ranks, which the engine does; give "
        "it to deepspeed.initialize and call engine.step()"
    )


def largest_update(betas: tuple[float, float], rate: float = 1.0) -> float:
    """Returns an upper bound of ``rate * |momentum| / sqrt(variance)`` in Adam: 7.27 for betas 0.9 and 0.999.

    Both are sums over past gradients, without correction for their start, and by Cauchy and Schwarz the quotient is at
    most ``(1 - beta1) / sqrt(1 - beta2) / sqrt(1 - beta1 ** 2 / beta2)`` (Adam, arXiv 1412.6980, section 2.1, has the
    simpler bound of a single gradient after zeros). A frozen variance gives no bound, because later gradients may be
    arbitrarily larger.

    Args:
        rate: Learning rate, or the sum of the learning rates of several updates.

    Returns:
        The bound; infinity (also for a rate of 0) if ``beta1 ** 2 >= beta2``, because there is none then.
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
        optimizer: The optimizer of the run; logs when it is garbage-collected or the process ends.
        line: Log format with two numbers: updates and ``freeze_step``; None: a line that nothing was compressed.
    """

    def __init__(self, optimizer: object, name: str, freeze_step: int, line: str | None = None) -> None:
        self._progress: dict[str, Any] = {"updates": 0, "logs": False}
        self._end = weakref.finalize(optimizer, _remind, self._progress, name, freeze_step, line or _UNCOMPRESSED)

    def note(self, updates: int, *, logs: bool) -> None:
        """Records the number of updates, and whether this rank logs the line."""
        self._progress["updates"], self._progress["logs"] = updates, logs

    def __call__(self) -> None:
        """Logs the line now if it is due, and not again later."""
        self._end()


def _remind(progress: dict[str, Any], name: str, freeze_step: int, line: str) -> None:
    if progress["logs"] and 0 < progress["updates"] <= freeze_step:
        logger.info("%s: %s", name, line % (progress["updates"], freeze_step))


def mask_of(group: dict[str, Any], numel: int, where: str) -> Tensor | None:
    """Returns the group's ``exp_avg_mask``, flat, or None. ``numel``: number of elements that the mask must have.

    Raises:
        ValueError: The mask has another number of elements.
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
