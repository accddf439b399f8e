"""Counts the memory of one step: entries of the memory tracker, and all other tensors that operations create.

:class:`MemoryCount` sees each operation that torch dispatches and each entry of the memory trackers. Storage in a
memory tracker is counted under its kind; all other new storage counts as *other* (activations, gradients not yet in a
bucket, scratch) until it is freed. It works on real tensors and in a simulation.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.nested import tensors_of
from deepspeed.torch_private import storage_key
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import MemoryTracker, StorageKind

META = torch.device("meta")
"""Where tensors have shapes, dtypes, storages and views, and no values."""


@dataclass(frozen=True)
class Moment:
    """A moment of a step."""

    phase: str = ""  # ``initialize``, ``forward``, ``backward`` or ``step``
    module: str = ""  # qualified name of the running module; empty outside of the model

    def __str__(self) -> str:
        return f"{self.phase} of {self.module}" if self.module else self.phase


@dataclass
class Peak:
    """The highest sum in one tier."""

    nbytes: int = 0  # the sum
    kinds: dict[StorageKind, int] = field(default_factory=dict)  # bytes of each kind in it
    other: int = 0  # bytes in it without a kind
    moment: Moment = Moment()  # when it was reached


class _Storage(weakref.ref[Any]):
    __slots__ = ("totals", "key", "nbytes", "pinned")
    key: int  # see ``storage_key``
    nbytes: int  # bytes counted as other; 0 if a memory tracker counts it
    totals: _TierTotals
    pinned: int  # bytes of locked pages


class _TierTotals:
    __slots__ = ("counted", "tier", "kinds", "other", "peak", "tops")

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.kinds: dict[StorageKind, int] = defaultdict(int)
        self.counted = self.other = 0  # sum of kinds; bytes of no kind
        self.peak = Peak()
        self.tops: dict[Moment, int] = {}


class MemoryCount(TorchDispatchMode):
    """Counts while it is active as a context.

    Attributes:
        moment: The phase and module of the step; set by the code that runs the step.
        pinned: Bytes of locked pages.
        most_pinned: Peak of ``pinned``.
        copied_down: Bytes copied from the device to the host.
        copied_up: Bytes copied from the host to the device.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._alive: dict[int, _Storage] = {}
        self._off_device = 0  # live storages in other tiers
        self._totals = {tier: _TierTotals(tier) for tier in Tier}
        self._on_device = self._totals[Tier.DEVICE]
        self._compared = (self._totals[Tier.DEVICE], self._totals[Tier.HOST])
        self.moment = Moment()
        self._moment_of_last_change = self.moment
        self.pinned = self.most_pinned = 0
        self.copied_down = self.copied_up = 0
        self._overlooks = False
        count = weakref.ref(self)

        def died(storage: _Storage) -> None:
            alive = count()
            if alive is not None:
                alive._forget(storage)

        self._died = died

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: nothing is traced here, so torch need not disable its compiler around each operation."""
        return False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Activates the dispatch mode, and observes all memory trackers."""
        before, MemoryTracker.observer = MemoryTracker.observer, self
        try:
            with self:
                yield
        finally:
            MemoryTracker.observer = before

    @contextmanager
    def overlooking(self) -> Iterator[None]:
        """Never counts storage allocated inside the context, as it belongs to the program."""
        before, self._overlooks = self._overlooks, True
        try:
            yield
        finally:
            self._overlooks = before

    @property
    def peaks(self) -> dict[Tier, Peak]:
        """The highest sum of each tier."""
        return {tier: totals.peak for tier, totals in self._totals.items()}

    @property
    def tops(self) -> dict[Tier, dict[Moment, int]]:
        """The highest sum of each tier by moment; of device and host."""
        return {totals.tier: totals.tops for totals in self._compared}

    def reset_peaks(self) -> None:
        """Resets the peaks to the current sums."""
        for totals in self._totals.values():
            totals.peak, totals.tops = Peak(), {}
        self.update_peaks()

    def live(self, tier: Tier) -> int:
        """Returns the bytes that are alive."""
        return self._totals[tier].counted + self._totals[tier].other

    def other(self, tier: Tier) -> int:
        """Returns the bytes that are alive and of no kind."""
        return self._totals[tier].other

    def update_peaks(self) -> None:
        """Updates the peaks. Called before storage is freed, so that none is missed while memory only grows."""
        moment = self._moment_of_last_change
        for totals in self._compared:
            total = totals.counted + totals.other
            if total > totals.tops.get(moment, 0):
                totals.tops[moment] = total
            if total > totals.peak.nbytes:
                totals.peak = Peak(total, dict(totals.kinds), totals.other, moment)

    # -- entries of the memory trackers ------------------------------------------------------------------------------

    def counted(self, kind: StorageKind, tier: Tier, nbytes: int) -> None:
        """Called when ``nbytes`` were added to the count (below zero: taken out)."""
        if nbytes < 0:
            self.update_peaks()
        self._moment_of_last_change = self.moment
        totals = self._totals[tier]
        totals.kinds[kind] += nbytes
        totals.counted += nbytes

    def claimed(self, tensor: torch.Tensor) -> None:
        """Called when the whole storage of ``tensor`` (any shape) has been counted."""
        found = self._alive.get(storage_key(tensor))
        if found is None:
            self._register(tensor.untyped_storage(), self._on_device, 0)
            return
        found.totals.other -= found.nbytes
        found.nbytes = 0

    # -- what operations make ----------------------------------------------------------------------------------------

    def note(self, tensor: torch.Tensor, tier: Tier, pinned: bool) -> None:
        """Records that the storage of ``tensor`` (any shape) is in another tier than the device."""
        storage = tensor.untyped_storage()
        found = self._alive.get(storage._cdata) or self._register(storage, self._on_device, 0)
        found.totals.other -= found.nbytes
        self._off_device += (tier is not Tier.DEVICE) - (found.totals is not self._on_device)
        found.totals = self._totals[tier]
        found.totals.other += found.nbytes
        if pinned:
            found.pinned = storage.nbytes()
            self.pinned += found.pinned
            self.most_pinned = max(self.most_pinned, self.pinned)

    def tier_of(self, tensor: torch.Tensor) -> Tier:
        """Returns the tier of a tensor of any shape."""
        found = self._alive.get(storage_key(tensor))
        return Tier.DEVICE if found is None else found.totals.tier

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool | None]:
        """Runs one operation; returns its result, and whether it is tensors with own storage (None: not known)."""
        return func(*args, **kwargs), None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, is_new = self.run(func, args, kwargs or {})
        if (is_new or is_new is None) and not self._overlooks:
            for tensor in (result,) if type(result) is torch.Tensor else tensors_of(result):
                if is_new or self._shows_new_storage(tensor, args, kwargs):
                    storage = tensor.untyped_storage()
                    self._register(storage, self._totals_of_result(args), storage.nbytes())
        if self._off_device and func is torch.ops.aten.copy_.default:
            self._count_copy(args[0], args[1])
        return result

    def _shows_new_storage(self, tensor: torch.Tensor, args: Any, kwargs: Any) -> bool:
        if tensor.device.type != self._device_type or tensor.layout is not torch.strided:
            return False
        key = storage_key(tensor)
        return key not in self._alive and not any(
            other.layout is torch.strided and storage_key(other) == key for other in tensors_of((args, kwargs))
        )

    def _totals_of_result(self, args: tuple[Any, ...]) -> _TierTotals:
        if not self._off_device:
            return self._on_device
        tiers = {self.tier_of(t) for t in tensors_of(args) if t.dim() and t.layout is torch.strided}
        return self._totals[Tier.HOST] if tiers and Tier.DEVICE not in tiers else self._on_device

    def _count_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        to, origin = self.tier_of(target), self.tier_of(source)
        nbytes = target.numel() * target.element_size()
        if origin is Tier.DEVICE and to is Tier.HOST:
            self.copied_down += nbytes
        elif origin is Tier.HOST and to is Tier.DEVICE:
            self.copied_up += nbytes

    def _register(self, storage: Any, totals: _TierTotals, nbytes: int) -> _Storage:
        made = _Storage(storage, self._died)
        made.key, made.nbytes, made.totals, made.pinned = storage._cdata, nbytes, totals, 0
        self._alive[made.key] = made
        self._off_device += totals is not self._on_device
        totals.other += nbytes
        self._moment_of_last_change = self.moment
        return made

    def _forget(self, storage: _Storage) -> None:
        del self._alive[storage.key]
        self._off_device -= storage.totals is not self._on_device
        self.pinned -= storage.pinned
        if storage.nbytes:
            self.update_peaks()
            self._moment_of_last_change = self.moment
            storage.totals.other -= storage.nbytes
