"""Counts the memory of one step: what the ledger has in its books, and every other tensor that operations make.

:class:`MemoryCount` sees each operation that torch dispatches and each entry of the ledgers. Storage that a ledger
answers for counts there, under its kind; all other storage that appears counts as *other* (activations, gradients on
their way to a bucket, scratch) until it dies. It works alike on real tensors and in a rehearsal.
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

from deepspeed.zero.placement import Home
from deepspeed.zero.storage import Kind, Ledger, storage_key

META = torch.device("meta")
"""Where tensors have shapes, dtypes, storages and views, and no values."""


@dataclass(frozen=True)
class Moment:
    """When something was so.

    Attributes:
        phase: ``initialize``, ``forward``, ``backward`` or ``step``.
        module: Qualified name of the module that was at work; empty outside of the model.
    """

    phase: str = ""
    module: str = ""

    def __str__(self) -> str:
        return f"{self.phase} of {self.module}" if self.module else self.phase


@dataclass
class Peak:
    """The highest sum in one home.

    Attributes:
        nbytes: The sum.
        kinds: What it was made of.
        other: Bytes of no kind.
        moment: When.
    """

    nbytes: int = 0
    kinds: dict[Kind, int] = field(default_factory=dict)
    other: int = 0
    moment: Moment = Moment()


@dataclass(slots=True)
class _Storage:
    """One storage that is alive."""

    reference: Any
    nbytes: int  # counted as other; 0 where a ledger answers for it
    home: Home
    pinned: int = 0  # bytes of locked pages


class _Books:
    """What is alive in one home, and the most there was."""

    __slots__ = ("booked", "kinds", "other", "peak")

    def __init__(self) -> None:
        self.kinds: dict[Kind, int] = defaultdict(int)
        self.booked = self.other = 0  # sum of kinds; bytes of no kind
        self.peak = Peak()


class MemoryCount(TorchDispatchMode):
    """Counts while it is active as a context.

    Args:
        device_type: Of the tensors that count.

    Attributes:
        moment: What is going on; set by whoever runs the step.
        pinned: Bytes of locked pages.
        most_pinned: The most there were.
        copied_down: Bytes copied from the device to the host.
        copied_up: Bytes copied from the host to the device.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._alive: dict[int, _Storage] = {}
        self._off_device = 0  # storages that are alive elsewhere
        self._books = {home: _Books() for home in Home}
        self._compared = (self._books[Home.DEVICE], self._books[Home.HOST])
        self.moment = Moment()
        self._moment_of_last_change = self.moment
        self.pinned = self.most_pinned = 0
        self.copied_down = self.copied_up = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Active as dispatch mode and as the auditor of all ledgers."""
        before, Ledger.auditor = Ledger.auditor, self
        try:
            with self:
                yield
        finally:
            Ledger.auditor = before

    @property
    def peaks(self) -> dict[Home, Peak]:
        """The highest sum of each home."""
        return {home: books.peak for home, books in self._books.items()}

    def reset_peaks(self) -> None:
        """From now on."""
        for books in self._books.values():
            books.peak = Peak()
        self.look()

    def live(self, home: Home) -> int:
        """Bytes that are alive."""
        return self._books[home].booked + self._books[home].other

    def other(self, home: Home) -> int:
        """Bytes that are alive and of no kind."""
        return self._books[home].other

    def look(self) -> None:
        """Compares what is alive with the peaks.

        It is done before each change, when an entry of a ledger and the storage that it stands for have both been seen.
        """
        for books in self._compared:
            total = books.booked + books.other
            if total > books.peak.nbytes:
                books.peak = Peak(total, dict(books.kinds), books.other, self._moment_of_last_change)
        self._moment_of_last_change = self.moment

    # -- what ledgers say --------------------------------------------------------------------------------------------

    def booked(self, kind: Kind, home: Home, nbytes: int) -> None:
        """See ``Auditor``."""
        self.look()
        books = self._books[home]
        books.kinds[kind] += nbytes
        books.booked += nbytes

    def claimed(self, tensor: torch.Tensor) -> None:
        """See ``Auditor``."""
        found = self._alive.get(storage_key(tensor))
        if found is None:
            self._register(tensor.untyped_storage(), Home.DEVICE, 0)
            return
        self._books[found.home].other -= found.nbytes
        found.nbytes = 0

    # -- what operations make ----------------------------------------------------------------------------------------

    def note(self, tensor: torch.Tensor, home: Home, pinned: bool) -> None:
        """Says that the storage of ``tensor`` is in another home than the device."""
        storage = tensor.untyped_storage()
        found = self._alive.get(storage._cdata) or self._register(storage, Home.DEVICE, 0)
        self._books[found.home].other -= found.nbytes
        self._off_device += (home is not Home.DEVICE) - (found.home is not Home.DEVICE)
        found.home = home
        self._books[home].other += found.nbytes
        if pinned:
            found.pinned = storage.nbytes()
            self.pinned += found.pinned
            self.most_pinned = max(self.most_pinned, self.pinned)

    def home_of(self, tensor: torch.Tensor) -> Home:
        """Where a tensor is."""
        found = self._alive.get(storage_key(tensor))
        return Home.DEVICE if found is None else found.home

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
        """Runs one operation.

        Returns:
            (its result, whether that is known to share no storage with the arguments).
        """
        return func(*args, **kwargs), False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result, is_new = self.run(func, args, kwargs)
        for tensor in (result,) if type(result) is torch.Tensor else tensors_of(result):
            if tensor.device.type != self._device_type or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._alive and (is_new or not any(_is_over(key, t) for t in tensors_of((args, kwargs)))):
                self.look()
                self._register(storage, self._home_of_result(args), storage.nbytes())
        if self._off_device and func is torch.ops.aten.copy_.default:
            self._count_copy(args[0], args[1])
        return result

    def _home_of_result(self, args: tuple[Any, ...]) -> Home:
        if not self._off_device:
            return Home.DEVICE
        homes = {self.home_of(t) for t in tensors_of(args) if t.dim() and t.layout is torch.strided}
        return Home.HOST if homes and Home.DEVICE not in homes else Home.DEVICE

    def _count_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        to, origin = self.home_of(target), self.home_of(source)
        nbytes = target.numel() * target.element_size()
        if origin is Home.DEVICE and to is Home.HOST:
            self.copied_down += nbytes
        elif origin is Home.HOST and to is Home.DEVICE:
            self.copied_up += nbytes

    def _register(self, storage: Any, home: Home, nbytes: int) -> _Storage:
        key = storage._cdata
        count = weakref.ref(self)

        def died(_reference: Any) -> None:
            alive = count()
            if alive is not None:
                alive._forget(key)

        made = self._alive[key] = _Storage(weakref.ref(storage, died), nbytes, home)
        self._off_device += home is not Home.DEVICE
        self._books[home].other += nbytes
        return made

    def _forget(self, key: int) -> None:
        found = self._alive.pop(key, None)
        if found is None:
            return
        self._off_device -= found.home is not Home.DEVICE
        self.pinned -= found.pinned
        if found.nbytes:
            self.look()
            self._books[found.home].other -= found.nbytes


def _is_over(key: int, tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and storage_key(tensor) == key


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
