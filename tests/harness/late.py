"""A network that is late: transfers complete in random order, at the last moment, and their buffers are poisoned first.

``late_network(seed)`` makes every transport that an engine creates a late one. From the moment a transfer is issued its
target holds NaN; its source is read and its target written only when it completes. It completes when somebody waits for
it, or earlier, by the dice, at any other issue or wait. All ranks throw the same dice, so they must make the same calls
in the same order, as they do where nothing depends on the rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from deepspeed.comm.host.gloo import GlooTransport
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.transports.transport import Reduction, Transport, Work


class _LateWork:
    """One transfer: poisoned when issued, carried out by ``complete``."""

    def __init__(self, network: Network, complete: Callable[[], None]) -> None:
        self._network = network
        self._complete: Callable[[], None] | None = complete

    def complete(self) -> None:
        """Moves the data now."""
        complete, self._complete = self._complete, None
        if complete is not None:
            complete()

    def will_arrive(self) -> bool:
        """Returns at random whether a wait would end soon, so that tests see both answers."""
        return self._complete is None or self._network.throw() < 0.5

    def wait(self) -> None:
        """Completes this transfer, and at random some others before it."""
        if self._complete is not None:
            self._network.complete_some()
            self._network.open.discard(self)
            self.complete()


class Network:
    """The pending transfers of this rank, over all transports."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self.open: _Ordered = _Ordered()
        self.completed_early = 0
        self.completed_out_of_order = 0

    def throw(self) -> float:
        """Returns a random number between 0 and 1."""
        return self._dice.random()

    def issue(self, complete: Callable[[], None]) -> _LateWork:
        """Adds a pending transfer."""
        work = _LateWork(self, complete)
        self.complete_some()
        self.open.add(work)
        return work

    def complete_some(self) -> None:
        """Completes a random selection of what is open, in random order."""
        chosen = [work for work in self.open if self._dice.random() < 0.3]
        self._dice.shuffle(chosen)
        for work in chosen:
            self.completed_out_of_order += work is not self.open.first()
            self.open.discard(work)
            work.complete()
        self.completed_early += len(chosen)


class _Ordered(dict[Any, None]):
    """A set that remembers the order of issue."""

    def add(self, work: _LateWork) -> None:
        self[work] = None

    def discard(self, work: _LateWork) -> None:
        self.pop(work, None)

    def first(self) -> _LateWork:
        return next(iter(self))


class LateTransport(GlooTransport):
    """gloo whose transfers go through a :class:`Network`."""

    network: Network

    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        """Overrides the base class: the transfer completes late."""
        _check_alive(flat, label)
        mine = self.my_slice(flat)
        for rank in range(self.size):
            if rank != self.rank:
                _poison(flat.narrow(0, rank * mine.numel(), mine.numel()))

        def complete() -> None:
            _check_alive(flat, label)
            landed = flat.clone()
            super(LateTransport, self).all_gather(landed, key=key, label=label).wait()
            flat.copy_(landed)

        return self.network.issue(complete)

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        """Overrides the base class: the transfer completes late."""
        return self._reduce(super().reduce_scatter, flat, out, how)

    def all_reduce(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        """Overrides the base class: the transfer completes late."""
        return self._reduce(super().all_reduce, flat, out, how)

    def _reduce(self, reduce: Callable[..., Work], flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        if out.data_ptr() != flat.data_ptr():
            _poison(out)

        def complete() -> None:
            _check_alive(flat, how.label)
            landed = torch.empty_like(out)
            reduce(flat.clone(), landed, how).wait()
            out.copy_(landed)

        return self.network.issue(complete)


def _poison(target: torch.Tensor) -> None:
    with torch.no_grad():
        target.fill_(float("nan"))


def _check_alive(flat: torch.Tensor, label: str) -> None:
    needed = (flat.storage_offset() + flat.numel()) * flat.element_size()
    assert flat.untyped_storage().nbytes() >= needed, f"{label}: its buffer was freed while it was in flight"


@contextmanager
def late_network(seed: int) -> Iterator[Network]:
    """Makes engines that are created inside use one late network."""
    network = Network(seed)

    create = Axis.transport

    def create_late(axis: Axis, *args: Any, **kwargs: Any) -> Transport:
        made = create(axis, *args, **kwargs)
        if args:  # not for an engine
            return made
        assert isinstance(made, GlooTransport), f"a late network needs several ranks on gloo, found {made.name}"
        made.__class__ = LateTransport
        made.network = network  # type: ignore[attr-defined]
        return made

    with patch.object(Axis, "transport", create_late):
        yield network
    assert not network.open, f"{len(network.open)} transfers were never waited for"
