"""Transfers over gloo: tagged sends and receives, directly into the slices of flat buffers.

A reduction is an exchange of slices with a local sum in rank order in fp32, so that results do not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from deepspeed.axes import DATA
from deepspeed.comm.base.counters import traffic
from deepspeed.comm.base.recorder import timed
from deepspeed.comm.host.message_queue import LONGEST, MessageQueue
from deepspeed.comm.transports.transport import (
    CHUNK,
    OWNERS,
    SMALL_CHANNELS,
    DoneWork,
    Reduction,
    TensorTransfer,
    Transport,
    Work,
    job_is_over,
    scaled_sum,
    start_p2p,
)

_CONFIRMATION = 3  # added to the key of a gather: the fourth kind of transfer, see transfer_key
_SMALL_TAG = 1 << 30


class GlooExchange:
    """Sends and receives in flight that are one transfer."""

    def __init__(self, transport: GlooTransport, works: list[Any], ticket: tuple[str, int], label: str) -> None:
        self._transport = transport
        self._works = works
        self._ticket = ticket
        self._label = label

    def will_arrive(self) -> bool:
        """Returns whether all peers are known to have sent their part, so that waiting needs no further call."""
        return not self._works

    def wait(self) -> None:
        """Blocks (host or current stream) until the result is in place. Later calls return at once."""
        if not self.will_arrive():
            self._transport.progress_pending()
        works, self._works = self._works, []
        if works:
            self._transport.guard_all(works, self._ticket, self._label)


class GlooGather(GlooExchange):
    """A gather of a flat buffer in flight: sends and receives of its slices."""

    def __init__(
        self,
        transport: GlooTransport,
        works: list[Any],
        flat: torch.Tensor,
        ticket: tuple[str, int],
        label: str,
        confirmations: list[tuple[int, torch.Tensor]],
    ) -> None:
        super().__init__(transport, works, ticket, label)
        self._flat = flat
        self._confirmations = confirmations

    @override
    def wait(self) -> None:
        works, self._works = self._works, []
        self._transport.guard_all(works, self._ticket, self._label, self._transport.patience)
        self._transport.note_confirmations(self._confirmations)
        self._confirmations = []


class _GlooReduce:
    """An exchange of slices chunk by chunk; the sum of a chunk runs while the next one is sent."""

    def __init__(
        self,
        transport: GlooTransport,
        flat: torch.Tensor,
        out: torch.Tensor,
        how: Reduction,
        *,
        whole: bool,
    ) -> None:
        self._transport = transport
        self._how = how
        self._flat = flat
        self._out = out
        self._whole = whole
        self._ticket = transport.issue("reduce", how.key)
        transport.reductions += 1
        self._number = transport.reductions
        # A rank holds (size - 1) other ranks' copies of the elements in flight.
        slices = 1 if whole else transport.size
        per_chunk = max(how.limit // slices, 1) // 64 * 64 or 64
        self._bounds = [(a, min(a + per_chunk, out.numel())) for a in range(0, out.numel(), per_chunk)]
        self._chunks: list[tuple[list[torch.Tensor], list[Any]]] = []
        if self._bounds:
            self._post(0)

    def _post(self, index: int) -> None:
        transport, (start, stop) = self._transport, self._bounds[index]
        parts, works = [], []
        length = self._out.numel()
        for peer in range(transport.size):
            if peer == transport.rank:
                base = 0 if self._whole else transport.rank * length
                parts.append(self._flat[base + start : base + stop])
                continue
            staging = torch.empty(stop - start, dtype=self._flat.dtype, device=self._flat.device)
            parts.append(staging)
            works.append(transport.receive(staging, peer, self._how.key))
        for peer in range(transport.size):
            if peer != transport.rank:
                base = 0 if self._whole else peer * length
                works.append(transport.send(self._flat[base + start : base + stop], peer, self._how.key))
        self._chunks.append((parts, works))

    def will_arrive(self) -> bool:
        return self._number <= self._transport.sent_by_all() and len(self._bounds) <= 1

    def wait(self) -> None:
        if not self.will_arrive():
            self._transport.progress_pending()
        while self._bounds:
            start, stop = self._bounds.pop(0)
            parts, works = self._chunks.pop(0)
            if self._bounds:
                self._post(0)
            self._transport.guard_all(works, self._ticket, self._how.label)
            scaled_sum(parts, self._out[start:stop], self._how.scale, self._how.visit)
        self._flat = self._out = torch.empty(0)


class _GlooSwap(GlooExchange):
    """An exchange of slices without a reduction."""

    def __init__(self, transport: GlooTransport, flat: torch.Tensor, out: torch.Tensor, key: int, label: str) -> None:
        super().__init__(transport, [], transport.issue("reduce", key), label)
        transport.reductions += 1
        self._number = transport.reductions
        slices, places = flat.view(transport.size, -1), out.view(transport.size, -1)
        peers = [(transport.rank + step) % transport.size for step in range(1, transport.size)]
        self._works += [transport.receive(places[peer], peer, key) for peer in peers]
        self._works += [transport.send(slices[peer], peer, key) for peer in reversed(peers)]
        places[transport.rank].copy_(slices[transport.rank])
        self._keep = flat, out

    @override
    def will_arrive(self) -> bool:
        return self._number <= self._transport.sent_by_all()


class _GlooAllReduce:
    """More than two ranks: reduce-scatter into this rank's slice of the result, then gather the fp32 slices."""

    def __init__(
        self,
        transport: GlooTransport,
        flat: torch.Tensor,
        out: torch.Tensor,
        how: Reduction,
    ) -> None:
        self._transport = transport
        self._how = how
        self._out: torch.Tensor | None = out
        # `visit` gets the whole result at the end, so it is not passed for this rank's slice.
        self._reduce = _GlooReduce(transport, flat, transport.my_slice(out), replace(how, visit=None), whole=False)

    def will_arrive(self) -> bool:
        return False  # its second half is issued only when the first has been waited for

    def wait(self) -> None:
        if self._out is None:
            return
        out, self._out = self._out, None
        self._reduce.wait()
        self._transport.gather_slices(out, self._how.key, "reduce", self._how.label).wait()
        if self._how.visit is not None:
            for part in out.split(CHUNK):
                self._how.visit(part)


class _GlooSum:
    """Gloo's own sum, in place.

    All ranks must start their sums in one order, as they do for activations. It needs fewer wake-ups than an exchange
    of slices.
    """

    def __init__(self, transport: GlooTransport, flat: torch.Tensor, label: str) -> None:
        nbytes = 2 * flat.numel() * flat.element_size()
        traffic.record_requested("all_reduce", nbytes, transport.axis)
        traffic.record_ran("all_reduce", nbytes, transport.axis)
        self._transport = transport
        self._label = label
        self._ticket = transport.issue("sum")
        self._work: Any = None
        if transport.watched is not None:  # a fake job waits for no rank, and its values do not matter
            transport.started += 1
            self._work = dist.all_reduce(flat, group=transport.group, async_op=True)

    def wait(self) -> None:
        """Blocks until the sum is there."""
        work, self._work = self._work, None
        if work is not None:
            self._transport.progress_pending()
            self._transport.guard(work.wait, self._ticket, self._label)

    def will_arrive(self) -> bool:
        return self._work is None


class GlooTransport(Transport):
    """Sends and receives of slices, matched by tag."""

    name = "gloo"

    def __init__(self, group: Any, rank: int, size: int, axis: str = DATA) -> None:
        super().__init__(group, rank, size, axis)
        self.reductions = 0  # that this rank has started
        self.patience: timedelta | None = None  # the longest wait for a peer's part of a gather; None: the group's
        self._sent = [0] * size  # reductions that each rank is known to have started

    def guard_all(
        self, works: Sequence[Any], ticket: tuple[str, int], label: str, patience: timedelta | None = None
    ) -> None:
        """Waits for torch's works, which are one transfer; ``patience`` is for each of them."""
        arguments = () if patience is None else (patience,)

        def wait() -> None:
            for work in works:
                work.wait(*arguments)

        self.guard(wait, ticket, label)

    @override
    def sum_in_place(self, flat: torch.Tensor, label: str) -> Work | None:
        return _GlooSum(self, flat, label)

    def sent_by_all(self) -> int:
        """Returns the number of reductions that every peer is known to have started."""
        return min(count for peer, count in enumerate(self._sent) if peer != self.rank)

    def send(self, tensor: torch.Tensor, peer: int, key: int) -> Any:
        """Starts to send ``tensor`` (contiguous, any shape) to group rank ``peer`` and returns torch's work."""
        traffic.record_ran("send", tensor.numel() * tensor.element_size(), self.axis)
        return self.start(self.group.send, tensor, peer, key)

    def receive(self, tensor: torch.Tensor, peer: int, key: int) -> Any:
        """Starts to receive into ``tensor`` (contiguous, any shape) from group rank ``peer``; returns torch's work."""
        return self.start(self.group.recv, tensor, peer, key)

    def start(self, transfer: Callable[..., Any], tensor: torch.Tensor, peer: int, key: int) -> Any:
        """Starts the process group's ``send`` or ``recv`` of ``tensor`` (contiguous, any shape); returns its work."""
        self.started += 1
        return start_p2p(transfer, tensor, peer, key)

    def gather_slices(self, flat: torch.Tensor, key: int, channel: str, label: str) -> Work:
        """Gathers all slices by sends and receives, on ``channel``; does not count the gather as requested.

        ``flat`` is a 1-D buffer of ``size`` equal slices; this rank's own slice must be in place. ``key`` is equal on
        all ranks.
        """
        ticket = self.issue(channel, key)
        length = flat.numel() // self.size
        mine = self.my_slice(flat)
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [self.receive(flat.narrow(0, peer * length, length), peer, key) for peer in peers]
        works += [self.send(mine, peer, key) for peer in reversed(peers)]
        confirmations: list[tuple[int, torch.Tensor]] = []
        if channel == "gather":
            confirmations, more = self.exchange_confirmations(peers, key)
            works += more
        return GlooGather(self, works, flat, ticket, label, confirmations)

    def exchange_confirmations(self, peers: list[int], key: int) -> tuple[list[tuple[int, torch.Tensor]], list[Any]]:
        """Sends ``peers`` the number of reductions that this rank has started, while ``confirms``.

        So they know which of their reductions can complete (``Work.will_arrive``).

        Returns:
            Their numbers, by peer, valid once the works are done; and the works.
        """
        if not self.confirms or not isinstance(self.companion, GlooTransport):
            return [], []
        mine_sent = torch.tensor([self.companion.reductions])
        confirmations = [(peer, torch.zeros(1, dtype=torch.int64)) for peer in peers]
        works = [self.receive(count, peer, key + _CONFIRMATION) for peer, count in confirmations]
        works += [self.start(self.group.send, mine_sent, peer, key + _CONFIRMATION) for peer in peers]
        self._keep = mine_sent
        return confirmations, works

    def note_confirmations(self, confirmations: list[tuple[int, torch.Tensor]]) -> None:
        """Stores the results of :meth:`exchange_confirmations`: pairs of a peer and its count, ``[1]`` int64."""
        for peer, count in confirmations:
            assert isinstance(self.companion, GlooTransport)
            self.companion._sent[peer] = max(self.companion._sent[peer], int(count))

    @override
    @timed("all_gather_into_tensor")
    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        traffic.record_requested("all_gather", flat.numel() * flat.element_size(), self.axis)
        if flat.numel() == 0:
            return DoneWork()
        return self.gather_slices(flat, key, "gather", label)

    @override
    @timed("reduce_scatter_tensor")
    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        traffic.record_requested("reduce_scatter", flat.numel() * flat.element_size(), self.axis)
        return _GlooReduce(self, flat, out, how, whole=False)

    @override
    @timed("all_reduce")
    def all_reduce(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        traffic.record_requested("all_reduce", 2 * flat.numel() * flat.element_size(), self.axis)
        if self.size == 2:  # with 2 ranks, exchanging everything moves as many bytes as reduce-scatter and gather
            return _GlooReduce(self, flat, out, how, whole=True)
        return _GlooAllReduce(self, flat, out, how)

    @override
    @timed("all_to_all_single")
    def all_to_all(
        self, source: torch.Tensor, sent: Sequence[int], out: torch.Tensor, received: Sequence[int], *, label: str
    ) -> Work:
        key = self.next_move(label)
        ticket = self.issue("all_to_all", key)
        sends, places = source.split(list(sent)), out.split(list(received))
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [self.receive(places[peer], peer, key) for peer in peers if places[peer].numel()]
        works += [self.send(sends[peer], peer, key) for peer in reversed(peers) if sends[peer].numel()]
        nbytes = sum(sends[peer].numel() for peer in peers) * source.element_size()
        traffic.record_requested("all_to_all", nbytes, self.axis)
        places[self.rank].copy_(sends[self.rank])
        return GlooExchange(self, works, ticket, label)

    @override
    @timed("all_to_all_single")
    def swap(self, flat: torch.Tensor, out: torch.Tensor, *, key: int, label: str) -> Work:
        nbytes = flat.numel() * flat.element_size()
        traffic.record_requested("swap", nbytes - nbytes // self.size, self.axis)
        return _GlooSwap(self, flat, out, key, label)

    @override
    def share(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        traffic.record_requested("all_gather", flat.numel() * flat.element_size(), self.axis)
        return self.gather_slices(flat, key, "reduce", label)

    @override
    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        return self.start_small(tensor, channel=channel, label=label)()

    @override
    def start_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> Callable[[], torch.Tensor]:
        self.progress_pending()
        rows = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype)
        rows[self.rank].copy_(tensor)
        tag = _SMALL_TAG + self.owner % OWNERS * len(SMALL_CHANNELS) + SMALL_CHANNELS.index(channel)
        queue = None if self.watched is None or channel == "objects" else self.watched.queue
        if isinstance(queue, MessageQueue) and rows[0].nbytes <= LONGEST:
            return self._start_by_queue(queue, rows, tag, self.issue(channel, tag), label)
        work = self.gather_slices(rows.view(-1), tag, channel, label)

        def arrived() -> torch.Tensor:
            work.wait()
            return rows

        return arrived

    def _start_by_queue(
        self, queue: MessageQueue, rows: torch.Tensor, tag: int, ticket: tuple[str, int], label: str
    ) -> Callable[[], torch.Tensor]:
        """Starts :meth:`start_small` by the message queue; of ``rows`` ``[ranks, elements]`` this rank's is written."""
        flat = memoryview(rows.view(torch.uint8).view(-1).numpy())  # type: ignore[arg-type]
        nbytes = rows[0].nbytes
        if queue.is_over:
            raise job_is_over(label)
        places = {peer: flat[peer * nbytes : (peer + 1) * nbytes] for peer in range(self.size)}
        mine = places.pop(self.rank)
        for peer in places:
            queue.post(peer, tag, mine)
        traffic.record_ran("send", nbytes * len(places), self.axis, len(places))
        take = queue.request(tag, places)

        def arrived() -> torch.Tensor:
            if queue.is_over:
                raise job_is_over(label)
            self.guard(take, ticket, label)
            return rows

        return arrived

    @override
    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> None:
        self.progress_pending()
        self.started += 1
        self.record_broadcast(tensor, source)
        work = dist.broadcast(tensor, group_src=source, group=self.group, async_op=True)
        self.guard(work.wait, self.issue("broadcast"), label)

    @override
    def move(self, transfers: Sequence[TensorTransfer], *, label: str) -> None:
        ticket, key = self.issue("transfers"), self.next_move()
        works: list[Any] = []
        nbytes = 0
        for transfer in transfers:  # those between the same two ranks match in this order
            if transfer.tensor is None or transfer.tensor.numel() == 0:
                continue
            if transfer.source != self.rank:
                if transfer.target in (None, self.rank):
                    works.append(self.receive(transfer.tensor, transfer.source, key))
                continue
            for peer in range(self.size) if transfer.target is None else (transfer.target,):
                if peer != self.rank:
                    works.append(self.send(transfer.tensor, peer, key))
                    nbytes += transfer.tensor.numel() * transfer.tensor.element_size()
        traffic.record_requested("move", nbytes, self.axis)
        self.progress_pending()
        self.guard_all(works, ticket, label)
