"""Ranks as threads of one process, which exchange real values over shared memory.

``run_threads(body, size)`` calls ``body(transport)`` in one thread for each rank and returns what they return, in rank
order. The transport has the interface of ``deepspeed.comm.transports``: a transfer is complete once every rank has
issued it, results are summed in rank order in fp32, and buffers are read when a transfer is issued and written when it
is waited for. A rank that waits for what another one never issues raises after a minute and names who is missing;
where one rank raises, those that wait for it stop at once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from typing_extensions import override

from deepspeed.comm.transports.transport import Reduction, TensorTransfer, Transport, Work, scaled_sum

Result = TypeVar("Result")
PATIENCE = 60.0
"""Seconds that a rank waits for the others."""


class RankGone(Exception):
    """Another rank of the network has raised."""


class Network:
    """The messages that not every rank has received yet.

    Attributes:
        log: By rank, ``(operation, label)`` of every call, in its order.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.log: list[list[tuple[str, str]]] = [[] for _ in range(size)]
        self.changed = threading.Condition()
        self._posted: dict[Hashable, dict[int, Any]] = {}
        self._read_counts: Counter[Hashable] = Counter()
        self._is_broken = False

    def post(self, name: Hashable, rank: int, value: Any) -> None:
        """Posts this rank's part of the exchange ``name``."""
        with self.changed:
            self._posted.setdefault(name, {})[rank] = value
            self.changed.notify_all()

    def is_complete(self, name: Hashable) -> bool:
        """Returns whether every rank has posted."""
        return len(self._posted.get(name, ())) == self.size

    def take(self, name: Hashable, rank: int, label: str) -> list[Any]:
        """Waits for the parts of all ranks; each rank must take them once."""
        end = time.monotonic() + PATIENCE
        with self.changed:
            while not self.is_complete(name):
                if self._is_broken:
                    raise RankGone(f"rank {rank}, waiting for {label}")
                if time.monotonic() > end:
                    missing = sorted({*range(self.size)} - {*self._posted.get(name, ())})
                    raise TimeoutError(f"rank {rank} waited {PATIENCE:g} s for rank(s) {missing}: {label}")
                self.changed.wait(0.1)
            parts = [self._posted[name][other] for other in range(self.size)]
            self._read_counts[name] += 1
            if self._read_counts[name] == self.size:
                del self._posted[name], self._read_counts[name]
            return parts

    def stop(self) -> None:
        """Wakes the ranks that wait, because a rank has raised."""
        with self.changed:
            self._is_broken = True
            self.changed.notify_all()

    @property
    def is_empty(self) -> bool:
        """Returns whether every rank has received every transfer."""
        return not self._posted


class _Transfer:
    """A transfer that has been issued."""

    def __init__(
        self,
        transport: LoopbackTransport,
        name: tuple[Hashable, ...],
        label: str,
        land: Callable[[list[Any]], None],
    ) -> None:
        self._transport, self._name, self._label = transport, name, label
        self._land: Callable[[list[Any]], None] | None = land

    def wait(self) -> None:
        """Takes the parts of all ranks and puts the result in place."""
        land, self._land = self._land, None
        if land is not None:
            self._transport.open.discard(self._name[:2])
            parts = self._transport.network.take(self._name, self._transport.rank, self._label)
            with torch.no_grad():
                land(parts)

    def will_arrive(self) -> bool:
        """Returns whether all ranks have issued it."""
        return self._land is None or self._transport.network.is_complete(self._name)


class LoopbackTransport(Transport):
    """One rank's end of a :class:`Network`.

    Attributes:
        open: Operation and key of each transfer that this rank has issued and not waited for. No two may be alike.
    """

    name = "loopback"

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__(None, rank, network.size)
        self.network = network
        self.ranks = tuple(range(network.size))
        self.open: set[tuple[Hashable, ...]] = set()
        self._calls: Counter[Hashable] = Counter()

    def _start(self, operation: str, key: Hashable, label: str, mine: Any, land: Callable[[list[Any]], None]) -> Work:
        assert (operation, key) not in self.open, f"rank {self.rank} issued {label} again while it is in flight"
        self.open.add((operation, key))
        self.started += 1
        self._calls[operation, key] += 1  # the n-th of a key belongs to the n-th of the other ranks
        name = (operation, key, self._calls[operation, key])
        self.network.log[self.rank].append((operation, label))
        self.network.post(name, self.rank, mine)
        return _Transfer(self, name, label, land)

    @override
    def all_gather(self, flat: torch.Tensor, *, key: int, label: str, operation: str = "all_gather") -> Work:
        def land(parts: list[torch.Tensor]) -> None:
            for rank, (slot, part) in enumerate(zip(flat.chunk(self.size), parts, strict=True)):
                if rank != self.rank:
                    slot.copy_(part)

        return self._start(operation, key, label, self.my_slice(flat).clone(), land)

    @override
    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        def land(parts: list[torch.Tensor]) -> None:
            _check_alike(parts, how.label)
            scaled_sum([self.my_slice(part) for part in parts], out, how.scale, how.visit)

        return self._start("reduce_scatter", how.key, how.label, flat.clone(), land)

    @override
    def all_reduce(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        def land(parts: list[torch.Tensor]) -> None:
            _check_alike(parts, how.label)
            scaled_sum(parts, out, how.scale, how.visit)

        return self._start("all_reduce", how.key, how.label, flat.clone(), land)

    @override
    def swap(self, flat: torch.Tensor, out: torch.Tensor, *, key: int, label: str) -> Work:
        def land(parts: list[torch.Tensor]) -> None:
            out.copy_(torch.cat([self.my_slice(part) for part in parts]))

        return self._start("swap", key, label, flat.clone(), land)

    @override
    def all_to_all(
        self, source: torch.Tensor, sent: Sequence[int], out: torch.Tensor, received: Sequence[int], *, label: str
    ) -> Work:
        def land(parts: list[tuple[torch.Tensor, ...]]) -> None:
            arrived = [part[self.rank] for part in parts]
            assert [len(part) for part in arrived] == list(received)
            out.copy_(torch.cat(arrived))

        return self._start("all_to_all", self.next_move(label), label, source.clone().split(list(sent)), land)

    @override
    def share(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        return self.all_gather(flat, key=key, label=label, operation="share")

    @override
    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        found: list[torch.Tensor] = []
        self._start("gather_small", channel, label, tensor.clone(), found.extend).wait()
        return torch.stack(found)

    @override
    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> None:
        def land(parts: list[torch.Tensor]) -> None:
            tensor.copy_(parts[source])

        mine = tensor.clone() if source == self.rank else None
        self._start("broadcast", "", label, mine, land).wait()

    @override
    def move(self, transfers: Sequence[TensorTransfer], *, label: str) -> None:
        def land(parts: list[dict[int, list[torch.Tensor]]]) -> None:
            arriving = {source: iter(sent.get(self.rank, ())) for source, sent in enumerate(parts)}
            for transfer in transfers:
                if transfer.source != self.rank and transfer.target in (self.rank, None):
                    assert transfer.tensor is not None
                    transfer.tensor.copy_(next(arriving[transfer.source]))

        leaving: dict[int, list[torch.Tensor]] = {}
        for transfer in transfers:
            if transfer.source == self.rank:
                assert transfer.tensor is not None
                targets = range(self.size) if transfer.target is None else (transfer.target,)
                for target in targets:
                    leaving.setdefault(target, []).append(transfer.tensor.clone())
        self._start("move", "", label, leaving, land).wait()


def _check_alike(parts: list[torch.Tensor], label: str) -> None:
    """Raises unless all ranks have sent the same number of elements of the same dtype, as real transports need."""
    found = {(part.dtype, part.numel()) for part in parts}
    assert len(found) == 1, f"{label}: ranks have sent {found}"


def run_threads(body: Callable[..., Result], size: int, *args: Any) -> list[Result]:
    """Calls ``body(transport, *args)`` as each rank of a network.

    Returns:
        What they return, in rank order.

    Raises:
        BaseException: What the first rank raised that did not only wait for another one.
        AssertionError: A transfer was issued that some rank never waited for.
    """
    network = Network(size)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(LoopbackTransport(network, rank), *args)
        except BaseException as error:
            failures.append(error)
            network.stop()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [error for error in failures if not isinstance(error, RankGone)]
    if failures:
        raise (own or failures)[0]
    assert network.is_empty, "some transfers were never waited for"
    return results
