"""Update drivers: what the ranks exchange for an update, after norm and flags, if that is not the mean gradient.

Nearly every optimizer has :class:`MeanGradient`, which exchanges nothing. ``zero.onebit`` has the drivers of the
1-bit family, which exchange momenta or movements of local steps, and ``zero.update.outer_step`` that of islands, which
wraps any of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import torch
from typing_extensions import override

from deepspeed.comm.base.codec import Codec
from deepspeed.zero.gradient.error_feedback import feedback_numel
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.group import Groups
from deepspeed.zero.storage import MemoryTracker
from deepspeed.zero.tiling.formula import MemoryFormula
from deepspeed.zero.tiling.layout import BucketLayout
from deepspeed.zero.update.masters import MasterBucket

DRIVER = "_ds_driver"
"""Attribute of an optimizer's class: ``module:class`` of its update driver; few optimizers have one."""

ERROR_FEEDBACK = "error feedback of what is sent in fewer bits"
"""Name of codecs' private states in messages."""


@dataclass(frozen=True)
class UpdateParts:
    """Holds the parts that an update driver works on."""

    masters: list[MasterBucket]  # master weights of this rank, by trainable bucket; the list may grow
    reducer: GradientReducer  # the gradients, in the same order
    groups: Groups  # the ranks that share masters, and those that decide together
    memory_tracker: MemoryTracker  # counts the memory
    carry_user_writes: Callable[[], None]  # copies a program's writes to parameters into the masters
    publish_masters: Callable[[], None]  # updates the compute parameters from masters that were written; a collective


@dataclass(frozen=True)
class ExchangeResult:
    """Holds what the ranks agree on in the exchange before an update."""

    norm: float  # norm of the mean gradient, unscaled, before clipping
    factor: float | None  # multiplier of what the update reads in each bucket; None for exactly 1
    used: list[list[bool]]  # by bucket and parameter, whether it is updated


@dataclass(frozen=True)
class PrivateState:
    """State that a rank keeps for itself, for checkpoints."""

    kind: str  # its name in a checkpoint, or the beginning of it where it belongs to a bucket
    layout: BucketLayout | None  # layout of the bucket; None where it belongs to the rank's place alone
    tensor: torch.Tensor  # the live tensor
    what: str  # what it is, for messages


class UpdateDriver(ABC):
    """Exchanges what an update needs from other ranks.

    Made before the model is sharded, from the torch optimizer; :meth:`open` gives it what it works on.

    Raises:
        TypeError: When a subclass is defined: its ``exchange`` contradicts its ``reads_mean_gradients``.

    Attributes:
        reported_codec: For plans and reports: the codec of what is sent instead of gradients; None where gradients are
            sent. The driver's own exchange uses it.
        has_warm_up: Gradients are sent in the first updates only.
        reads_mean_gradients: Whether the update reads the mean gradients that the reducer has made; otherwise it reads
            what :meth:`exchange` stores, and a subclass must override that method.
    """

    reported_codec: Codec | None = None
    has_warm_up = False
    reads_mean_gradients = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        exchanges = cls.exchange is not UpdateDriver.exchange
        if exchanges and cls.reads_mean_gradients:
            raise TypeError(
                f"{cls.__name__}.exchange is never called, because reads_mean_gradients is True. Set "
                "reads_mean_gradients = False in the class, or remove exchange"
            )
        if not exchanges and not cls.reads_mean_gradients:
            raise TypeError(
                f"{cls.__name__} has no exchange, and reads_mean_gradients is False. Override exchange, or set "
                "reads_mean_gradients = True in the class"
            )

    @abstractmethod
    def open(self, parts: UpdateParts) -> None:
        """Receives the parts that it works on; the next call is :meth:`begin_update`."""

    @abstractmethod
    def begin_update(self, before: int) -> None:
        """Prepares the reducer for the gradients of the next update. Every rank must call it.

        Args:
            before: Updates so far, skipped ones included; equal on all ranks, also after a checkpoint was loaded.
        """

    def exchange(self, norm: float, used: list[list[bool]], *, scale: float, clip_grad: float) -> ExchangeResult:
        """Stores what the update reads in the place of the reduced gradients. Every rank must call it.

        Not called if :attr:`reads_mean_gradients`: then there is nothing to exchange.

        Args:
            norm: Unscaled norm, over all ranks, of the gradients that each of them has now.
            used: By bucket and parameter, whether any rank has a gradient of it.
            scale: Factor on the loss, and so on the gradients.
            clip_grad: Largest norm; 0 for no clipping.
        """
        raise NotImplementedError

    @abstractmethod
    def end_update(self) -> None:
        """Called after each update, applied or skipped. Every rank must call it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Makes weights equal on ranks where they differ, so that they can be saved. Every rank must call it."""

    @abstractmethod
    def restart(self) -> None:
        """Resets values derived from weights and optimizer states, after these have been replaced."""

    @abstractmethod
    def private_states(self) -> Sequence[PrivateState]:
        """Returns this rank's private states, which checkpoints should contain."""

    @abstractmethod
    def private_formula(self, formula: MemoryFormula) -> Sequence[tuple[int, str]]:
        """Returns ``(bytes on this rank, formula)`` for each kind of private state."""

    @abstractmethod
    def end(self) -> None:
        """Called when the run is over."""


class MeanGradient(UpdateDriver):
    """The mean of the ranks' gradients, which the reducer has made by the time of the update."""

    reads_mean_gradients = True

    @override
    def open(self, parts: UpdateParts) -> None:
        self._masters = parts.masters
        self._reducer = parts.reducer
        self._groups = parts.groups
        self._memory_tracker = parts.memory_tracker

    @override
    def begin_update(self, before: int) -> None:
        self._reducer.begin_update(before)

    @override
    def end_update(self) -> None:
        pass

    @override
    def synchronize(self) -> None:
        pass

    @override
    def restart(self) -> None:
        pass

    @override
    def private_states(self) -> Sequence[PrivateState]:
        return [
            PrivateState("error", gradients.bucket.layout, gradients.feedback.tensor, ERROR_FEEDBACK)
            for gradients in self._reducer.buckets
            if gradients.feedback is not None
        ]

    @override
    def private_formula(self, formula: MemoryFormula) -> Sequence[tuple[int, str]]:
        if not any(group.feeds_back for group in self._groups):
            return []
        placement = formula.placement
        wide = 8 if self._reducer.policy.may_skip else 4
        to_owner, spread = placement.shard_master, placement.spread_master
        shared = [bucket for bucket in formula.trained_buckets if bucket.num_slices > 1]
        total = sum(wide * feedback_numel(bucket, to_owner=to_owner, spread=spread) for bucket in shared)
        if formula.has_copies:  # neighbors, then the ranks with the same slices
            return [(total, f"{wide} x (Psi + Psi / S)" if spread else f"{wide} x (Psi + Psi / S + Psi / N)")]
        return [(total, f"{wide} x Psi" if to_owner else f"{wide} x (Psi + Psi / N)")]

    @override
    def end(self) -> None:
        pass


def driver_of(optimizer: torch.optim.Optimizer | None) -> UpdateDriver:
    """Returns the driver of an optimizer's updates: the one that its class names, or that of mean gradients."""
    name: str | None = getattr(optimizer, DRIVER, None)
    if name is None:
        return MeanGradient()
    driver: UpdateDriver = resolve_name(name)(optimizer)
    return driver
