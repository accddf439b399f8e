"""How slices of flat buffers travel between the ranks of one group.

Numeric code asks for three things: fill a buffer from everybody's slice (*gather*), reduce a buffer to the owner of
each slice (*reduce-scatter*), reduce a buffer to everybody (*all-reduce*). Each returns a ``Work``, whose ``wait`` may
be called more than once. A transport is chosen once per group:

- ``LocalTransport``: a group of one.
- ``GlooTransport``: tagged sends and receives straight into the slices, and reductions as an exchange of slices with a
  local sum in rank order in fp32. Both move the bytes of the collective, need no copy of the whole output, and give
  sums that do not depend on timing.
- ``NativeTransport``: the backend's own collectives (NCCL and its kin).

Every rank of the group must make the same calls with the same keys; on gloo the order may differ, elsewhere it may not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from deepspeed.comm.counters import traffic, waiting
from deepspeed.comm.recorder import timed
from deepspeed.comm.store import is_alive, rendezvous_store
from deepspeed.comm.watch import Watch
from deepspeed.comm.world import stand_in

_CHUNK = 262144  # elements of a local sum: 1 MiB of fp32, so that operands stay in cache (64Ki was 15 % slower)
_PIECES = 2  # kind of transfer, see transfer_key
_CONFIRMATION = 3  # added to the key of a gather: the fourth kind of transfer, see transfer_key
_SMALL_TAG = 1 << 30
_ABORT_TAG = _SMALL_TAG - 1
_OWNERS = 8  # engines whose transfers keep apart by tag; more engines reuse the tags in turn
_ROUNDS = 1 << 10
_BUCKETS = 1 << 15
SMALL_CHANNELS = ("order", "step", "call")
"""Streams of small exchanges: the order of gathers, the agreements of an update, calls that all ranks make alike."""


Visit = Callable[[torch.Tensor], None]
"""What a reduction does with every stretch of its result while that is in the cache; it must not keep it."""


def transfer_key(owner: int, bucket: int, kind: int, count: int) -> int:
    """The number that matches the sends and receives of one transfer (below 2**30).

    Args:
        owner: Number of the engine.
        bucket: Index of the bucket.
        kind: 0 for gathers, 1 for reductions, 2 for pieces.
        count: Transfers of this bucket so far.
    """
    return ((owner % _OWNERS * _BUCKETS + bucket % _BUCKETS) * _ROUNDS + count % _ROUNDS) * 4 + kind


class Work(Protocol):
    """A transfer on its way. It keeps its buffers alive."""

    def wait(self) -> None:
        """Blocks (host or current stream) until the result is in place. Later calls return at once."""

    def will_arrive(self) -> bool:
        """Whether waiting depends on no further call of this rank: all peers are known to have sent their part."""


@dataclass(frozen=True)
class Piece:
    """One tensor on its way from one rank.

    Attributes:
        source: Group rank that has the values.
        target: Group rank that gets them; None: all ranks.
        tensor: The values on the source, the place for them on a target; contiguous, of equal length and dtype. None on
            ranks that have no part in it.
    """

    source: int
    target: int | None
    tensor: torch.Tensor | None


class DoneWork:
    """A transfer that needed nothing."""

    def wait(self) -> None:
        """Blocks until the transfer is done."""
        return

    def will_arrive(self) -> bool:
        """See the class this one derives from."""
        return True


class Transport:
    """Moves slices inside one group.

    Attributes:
        group: The torch process group, or None for the transport of one rank.
        rank: This rank in the group.
        size: Ranks in the group.
        ranks: Their global ranks; empty for the transport of one rank.
        owner: Number of the engine that the transfers belong to; equal on all ranks.
        scope: Begins the names of its channels, where several groups have one watch.
        members: Its ranks in the numbering of the watch; None: all of them.
        replicas: The ranks that hold the same slices as this one; None where no others do (see ``comm.axes``).
    """

    name = "local"

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.ranks: tuple[int, ...] = ()
        self.owner = 0
        self.watch: Watch | None = None
        self._moves = 0
        self.companion: Transport | None = None
        self.confirms = False
        self.scope = ""
        self.members: tuple[int, ...] | None = None
        self.replicas: Transport | None = None
        self._everyone: Transport | None = None

    @property
    def everyone(self) -> Transport:
        """All ranks that train the same model and so make the same calls: this group, or the one it is a part of."""
        return self if self._everyone is None else self._everyone

    def belongs_to(self, everyone: Transport) -> None:
        """Says of which group this one is a part."""
        self._everyone = everyone

    def next_owner(self) -> int:
        """A number for one more engine on this group; equal on all ranks if all make their engines together."""
        return self.watch.next_owner() if self.watch is not None else 0

    def issue(self, channel: str) -> tuple[str, int]:
        """Counts a transfer on one of this engine's channels."""
        full_name = f"{self.owner}/{self.scope}{channel}"
        return full_name, self.watch.issue(full_name) if self.watch is not None else 0

    def guard(self, blocking: Callable[[], Any], ticket: tuple[str, int], label: str) -> None:
        """Runs a blocking wait for the transfer ``ticket``, supervised."""
        begun = time.perf_counter() if waiting.is_running else 0.0
        if self.watch is None:
            blocking()
        else:
            self.watch.wait(blocking, *ticket, label, self.members)
        if waiting.is_running:
            waiting.seconds += time.perf_counter() - begun

    def my_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a flat buffer, as a view."""
        length = flat.numel() // self.size
        return flat.narrow(0, self.rank * length, length)

    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        """Fills ``flat`` (1-D, any dtype) from the slices; this rank's own slice must be in place.

        Args:
            flat: Buffer of ``size`` equal slices.
            key: Number that is equal on all ranks for this gather and for no other one in flight.
            label: What travels, for error messages.
        """
        raise NotImplementedError

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        key: int,
        label: str,
        limit: int,
        visit: Visit | None = None,
    ) -> Work:
        """Sums everybody's ``flat`` and leaves ``scale`` times this rank's slice of the sum in ``out``.

        Args:
            flat: 1-D buffer of ``size`` equal slices in the reduce dtype; unchanged afterwards unless documented.
            out: 1-D fp32 buffer of one slice.
            scale: Factor on the sum (1 / size for a mean).
            key: As in :meth:`all_gather`.
            label: What travels.
            limit: Most elements of ``flat`` that may travel at once.
            visit: Called, at the latest in ``wait``, with stretches that together are ``out``, each as soon as it is
                finished and a multiple of 64 elements long.
        """
        raise NotImplementedError

    def all_reduce(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        key: int,
        label: str,
        limit: int,
        visit: Visit | None = None,
    ) -> Work:
        """Sums everybody's ``flat`` and leaves ``scale`` times the sum in ``out`` (fp32, same length) on all ranks."""
        raise NotImplementedError

    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        """Everybody's small 1-D tensor as rows of a 2-D one; blocks.

        Args:
            tensor: On the host, of equal length on all ranks that use ``channel``.
            channel: One of ``SMALL_CHANNELS``; exchanges of one channel never meet those of another.
            label: What this rank is about to do, for whoever waits in vain.
        """
        raise NotImplementedError

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrites ``tensor`` with that of group rank ``source``; blocks."""
        raise NotImplementedError

    def move(self, pieces: Sequence[Piece], *, label: str) -> None:
        """Moves many pieces in one round; blocks.

        Every rank must call it, with the pieces in which it has a part in the same order as on their other ranks;
        a rank may have a part in none.

        Args:
            pieces: What travels; a piece from a rank to itself is left to the caller.
            label: What travels, for error messages.
        """
        raise NotImplementedError

    def next_move(self) -> int:
        """The key of the next round of pieces."""
        self._moves += 1
        return transfer_key(self.owner, 0, _PIECES, self._moves)

    def abort(self) -> None:
        """Makes every pending and later wait of the group raise. Called from a watching thread."""


def scaled_sum(parts: list[torch.Tensor], out: torch.Tensor, scale: float, visit: Visit | None = None) -> None:
    """``out = scale * (parts[0] + parts[1] + ...)`` in fp32, left to right, in cache-sized chunks.

    Args:
        parts: 1-D tensors of equal length and any floating dtype.
        out: 1-D fp32 tensor of that length; may be ``parts[0]``.
        scale: Factor on the sum.
        visit: Called with every finished chunk while it is in the cache, a multiple of 64 elements if ``out`` is one.
    """
    numel = out.numel()
    chunk = _CHUNK if out.device.type == "cpu" else numel
    for start in range(0, numel, max(chunk, 1)):
        stop = min(start + chunk, numel)
        total = out[start:stop]
        first = parts[0][start:stop]
        if len(parts) > 1 and first.dtype == torch.float32 and parts[1].dtype == torch.float32:
            torch.add(first, parts[1][start:stop], out=total)
            rest = parts[2:]
        else:
            if total.data_ptr() != first.data_ptr():
                total.copy_(first)
            rest = parts[1:]
        for part in rest:
            total.add_(part[start:stop])
        if scale != 1.0:
            total.mul_(scale)
        if visit is not None:
            visit(total)


class LocalTransport(Transport):
    """A group of one rank: nothing travels."""

    name = "local"

    def __init__(self) -> None:
        super().__init__(None, 0, 1)

    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        """See the class this one derives from."""
        return DoneWork()

    def reduce_scatter(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        key: int,
        label: str,
        limit: int,
        visit: Visit | None = None,
    ) -> Work:
        """See the class this one derives from."""
        scaled_sum([flat], out, scale, visit)
        return DoneWork()

    all_reduce = reduce_scatter

    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        """See the class this one derives from."""
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """See the class this one derives from."""
        return

    def move(self, pieces: Sequence[Piece], *, label: str) -> None:
        """See the class this one derives from."""
        return


class _GlooGather:
    def __init__(
        self,
        transport: GlooTransport,
        works: list[Any],
        flat: torch.Tensor,
        ticket: tuple[str, int],
        label: str,
        confirmations: list[tuple[int, torch.Tensor]],
    ) -> None:
        self._transport = transport
        self._works = works
        self._flat = flat
        self._ticket = ticket
        self._label = label
        self._confirmations = confirmations

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            self._transport.guard(work.wait, self._ticket, self._label)
        for peer, count in self._confirmations:
            self._transport.note_sent(peer, int(count))
        self._confirmations = []

    def will_arrive(self) -> bool:
        """See the class this one derives from."""
        return not self._works


class _GlooReduce:
    """An exchange of slices piece by piece; the sum of a piece runs while the next one travels."""

    def __init__(
        self,
        transport: GlooTransport,
        flat: torch.Tensor,
        out: torch.Tensor,
        *,
        whole: bool,
        scale: float,
        key: int,
        label: str,
        limit: int,
        visit: Visit | None = None,
    ) -> None:
        self._transport = transport
        self._visit = visit
        self._flat = flat
        self._out = out
        self._whole = whole
        self._scale = scale
        self._key = key
        self._ticket = transport.issue("reduce")
        transport.reductions += 1
        self._number = transport.reductions
        self._label = label
        # A rank holds (size - 1) foreign copies of the elements that are on the wire.
        slices = 1 if whole else transport.size
        per_piece = max(limit // slices, 1) // 64 * 64 or 64
        self._bounds = [(a, min(a + per_piece, out.numel())) for a in range(0, out.numel(), per_piece)]
        self._pieces: list[tuple[list[torch.Tensor], list[Any]]] = []
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
            works.append(transport.receive(staging, peer, self._key))
        for peer in range(transport.size):
            if peer != transport.rank:
                base = 0 if self._whole else peer * length
                works.append(transport.send(self._flat[base + start : base + stop], peer, self._key))
        self._pieces.append((parts, works))

    def will_arrive(self) -> bool:
        return self._number <= self._transport.sent_by_all() and len(self._bounds) <= 1

    def wait(self) -> None:
        while self._bounds:
            start, stop = self._bounds.pop(0)
            parts, works = self._pieces.pop(0)
            if self._bounds:
                self._post(0)
            for work in works:
                self._transport.guard(work.wait, self._ticket, self._label)
            scaled_sum(parts, self._out[start:stop], self._scale, self._visit)
        self._flat = self._out = torch.empty(0)


class _GlooAllReduce:
    """More than two ranks: reduce-scatter into this rank's slice of the result, then gather the fp32 slices."""

    def __init__(
        self,
        transport: GlooTransport,
        flat: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        key: int,
        label: str,
        limit: int,
        visit: Visit | None = None,
    ) -> None:
        self._transport = transport
        self._visit = visit
        self._out: torch.Tensor | None = out
        self._key = key
        self._label = label
        self._reduce = _GlooReduce(
            transport, flat, transport.my_slice(out), whole=False, scale=scale, key=key, label=label, limit=limit
        )

    def will_arrive(self) -> bool:
        return False  # its second half is issued only when the first has been waited for

    def wait(self) -> None:
        if self._out is None:
            return
        out, self._out = self._out, None
        self._reduce.wait()
        self._transport.gather_slices(out, self._key, "reduce", self._label).wait()
        if self._visit is not None:
            for part in out.split(_CHUNK):
                self._visit(part)


class GlooTransport(Transport):
    """Sends and receives of slices, matched by tag.

    Attributes:
        reductions: Reductions that this rank has started.
        companion: The transport that carries this engine's reductions. While ``confirms``, gathers carry along how many
            of them a rank has started, so that its peers know which may be waited for (see ``Work.will_arrive``).
        confirms: Set during backward, on all ranks alike.
    """

    name = "gloo"

    def __init__(self, group: Any, rank: int, size: int) -> None:
        super().__init__(group, rank, size)
        self.reductions = 0
        self._sent = [0] * size

    def note_sent(self, peer: int, count: int) -> None:
        """Notes that ``peer`` has started at least ``count`` reductions."""
        assert isinstance(self.companion, GlooTransport)
        self.companion._sent[peer] = max(self.companion._sent[peer], count)

    def sent_by_all(self) -> int:
        """Reductions that every peer is known to have started."""
        return min(count for peer, count in enumerate(self._sent) if peer != self.rank)

    def send(self, tensor: torch.Tensor, peer: int, key: int) -> Any:
        """See the class this one derives from."""
        traffic.record_ran("send", tensor.numel() * tensor.element_size())
        return self.group.send([tensor], peer, key)

    def receive(self, tensor: torch.Tensor, peer: int, key: int) -> Any:
        """See the class this one derives from."""
        return self.group.recv([tensor], peer, key)

    def gather_slices(self, flat: torch.Tensor, key: int, channel: str, label: str) -> Work:
        """The gather itself, not counted as asked for."""
        ticket = self.issue(channel)
        length = flat.numel() // self.size
        mine = self.my_slice(flat)
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [self.receive(flat.narrow(0, peer * length, length), peer, key) for peer in peers]
        works += [self.send(mine, peer, key) for peer in reversed(peers)]
        confirmations: list[tuple[int, torch.Tensor]] = []
        if self.confirms and channel == "gather" and isinstance(self.companion, GlooTransport):
            mine_sent = torch.tensor([self.companion.reductions])
            confirmations = [(peer, torch.zeros(1, dtype=torch.int64)) for peer in peers]
            works += [self.receive(count, peer, key + _CONFIRMATION) for peer, count in confirmations]
            works += [self.group.send([mine_sent], peer, key + _CONFIRMATION) for peer in peers]
            self._keep = mine_sent
        return _GlooGather(self, works, flat, ticket, label, confirmations)

    @timed("all_gather_into_tensor")
    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        """See the class this one derives from."""
        traffic.record_asked("all_gather", flat.numel() * flat.element_size())
        if flat.numel() == 0:
            return DoneWork()
        return self.gather_slices(flat, key, "gather", label)

    @timed("reduce_scatter_tensor")
    def reduce_scatter(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        key: int,
        label: str,
        limit: int,
        visit: Visit | None = None,
    ) -> Work:
        """See the class this one derives from."""
        traffic.record_asked("reduce_scatter", flat.numel() * flat.element_size())
        return _GlooReduce(self, flat, out, whole=False, scale=scale, key=key, label=label, limit=limit, visit=visit)

    @timed("all_reduce")
    def all_reduce(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        key: int,
        label: str,
        limit: int,
        visit: Visit | None = None,
    ) -> Work:
        """See the class this one derives from."""
        traffic.record_asked("all_reduce", 2 * flat.numel() * flat.element_size())
        if self.size == 2:  # exchanging everything moves the same bytes as reduce-scatter and gather
            return _GlooReduce(self, flat, out, whole=True, scale=scale, key=key, label=label, limit=limit, visit=visit)
        return _GlooAllReduce(self, flat, out, scale=scale, key=key, label=label, limit=limit, visit=visit)

    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        """See the class this one derives from."""
        rows = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype)
        flat = rows.view(-1)
        self.my_slice(flat).copy_(tensor)
        tag = _SMALL_TAG + self.owner % _OWNERS * len(SMALL_CHANNELS) + SMALL_CHANNELS.index(channel)
        self.gather_slices(flat, tag, channel, label).wait()
        return rows

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """See the class this one derives from."""
        dist.broadcast(tensor, group_src=source, group=self.group)

    def move(self, pieces: Sequence[Piece], *, label: str) -> None:
        """See the class this one derives from."""
        ticket, key = self.issue("pieces"), self.next_move()
        works: list[Any] = []
        nbytes = 0
        for piece in pieces:  # pieces between the same two ranks match in this order
            if piece.tensor is None or piece.tensor.numel() == 0:
                continue
            if piece.source != self.rank:
                if piece.target in (None, self.rank):
                    works.append(self.receive(piece.tensor, piece.source, key))
                continue
            for peer in range(self.size) if piece.target is None else (piece.target,):
                if peer != self.rank:
                    works.append(self.send(piece.tensor, peer, key))
                    nbytes += piece.tensor.numel() * piece.tensor.element_size()
        traffic.record_asked("move", nbytes)
        for work in works:
            self.guard(work.wait, ticket, label)

    def abort(self) -> None:
        """See the class this one derives from."""
        # gloo cannot cancel a receive; a receive that times out closes every pair, which wakes all pending waits.
        peer = (self.rank + 1) % self.size
        try:
            self.group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # the time-out is the purpose


class _NativeWork:
    def __init__(
        self, work: Any, transport: NativeTransport, ticket: tuple[str, int], label: str, finish: Any, keep: Any
    ) -> None:
        self._work = work
        self._transport = transport
        self._ticket = ticket
        self._label = label
        self._finish = finish
        self._keep = keep

    def will_arrive(self) -> bool:
        """Waiting puts the current stream behind the transfer, and later gathers behind that stream."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._work is None:
            return
        work, self._work = self._work, None
        self._transport.guard(work.wait, self._ticket, self._label)
        if self._finish is not None:
            self._finish()
        self._keep = None


class NativeTransport(Transport):
    """The backend's own collectives. Calls must be made in the same order on all ranks of the group."""

    name = "native"

    def _work(self, work: Any, channel: str, label: str, finish: Callable[[], None] | None, keep: Any) -> Work:
        return _NativeWork(work, self, self.issue(channel), label, finish, keep)

    @timed("all_gather_into_tensor")
    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        """See the class this one derives from."""
        nbytes = flat.numel() * flat.element_size()
        traffic.record_asked("all_gather", nbytes)
        if flat.numel() == 0:
            return DoneWork()
        traffic.record_ran("all_gather_into_tensor", nbytes // self.size)
        work = self.group._allgather_base(flat, self.my_slice(flat))
        return self._work(work, "gather", label, None, flat)

    @timed("reduce_scatter_tensor")
    def reduce_scatter(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        key: int,
        label: str,
        limit: int,
        visit: Visit | None = None,
    ) -> Work:
        """See the class this one derives from."""
        nbytes = flat.numel() * flat.element_size()
        traffic.record_asked("reduce_scatter", nbytes)
        if flat.numel() == 0:
            return DoneWork()
        traffic.record_ran("reduce_scatter_tensor", nbytes)
        target = out if out.dtype == flat.dtype else torch.empty_like(self.my_slice(flat))
        work = self.group._reduce_scatter_base(target, flat)
        return self._work(work, "reduce", label, lambda: scaled_sum([target], out, scale, visit), (flat, out))

    @timed("all_reduce")
    def all_reduce(
        self,
        flat: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        key: int,
        label: str,
        limit: int,
        visit: Visit | None = None,
    ) -> Work:
        """See the class this one derives from."""
        nbytes = flat.numel() * flat.element_size()
        traffic.record_asked("all_reduce", 2 * nbytes)
        if flat.numel() == 0:
            return DoneWork()
        traffic.record_ran("all_reduce", 2 * nbytes)
        work = self.group.allreduce([flat])
        return self._work(work, "reduce", label, lambda: scaled_sum([flat], out, scale, visit), (flat, out))

    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        """See the class this one derives from."""
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else tensor.device
        mine = tensor.to(device)
        rows = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype, device=device)
        work = self.group._allgather_base(rows.view(-1), mine)
        self.guard(work.wait, self.issue(channel), label)
        return rows.to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """See the class this one derives from."""
        dist.broadcast(tensor, group_src=source, group=self.group)

    def move(self, pieces: Sequence[Piece], *, label: str) -> None:
        """See the class this one derives from."""
        ticket = self.issue("pieces")
        works: list[Any] = []
        between: list[Any] = []
        nbytes = 0
        for piece in pieces:
            tensor = piece.tensor
            if tensor is None or tensor.numel() == 0:
                continue
            if piece.target is None:
                works.append(dist.broadcast(tensor, group_src=piece.source, group=self.group, async_op=True))
            elif piece.source == self.rank != piece.target:
                between.append(dist.P2POp(dist.isend, tensor, group=self.group, group_peer=piece.target))
            elif piece.target == self.rank != piece.source:
                between.append(dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=piece.source))
            nbytes += tensor.numel() * tensor.element_size() if piece.source == self.rank else 0
        traffic.record_asked("move", nbytes)
        traffic.record_ran("broadcast or send", nbytes, len(works) + len(between))
        if between:
            works += dist.batch_isend_irecv(between)
        for work in works:
            self.guard(work.wait, ticket, label)

    def abort(self) -> None:
        """See the class this one derives from."""
        self.group.abort()


def create_transport(
    group: Any = None, *, device: torch.device | None = None, timeout: timedelta | None = None
) -> Transport:
    """A transport over ``group``; every rank of the default group must call it in the same order.

    Args:
        group: A torch process group; None is the default group. Without an initialised process group the result is the
            transport of one rank.
        device: Where the buffers live; a group with several backends is used through the one of this device.
        timeout: Time limit of the communicator that is made where order matters (not gloo), so that the transfers of
            two transports do not wait for each other.
    """
    if (others := stand_in()) is not None:
        return others.transport(device)
    if not dist.is_initialized():
        return LocalTransport()
    group = group if group is not None else dist.group.WORLD
    size = dist.get_world_size(group)
    if size == 1:
        return LocalTransport()
    rank = dist.get_rank(group)
    backend = backend_for(group, device)
    ranks = dist.get_process_group_ranks(group)
    if backend == "gloo":
        transport: Transport = GlooTransport(group, rank, size)
    else:
        transport = NativeTransport(dist.new_group(ranks, timeout=timeout, backend=backend), rank, size)
    transport.ranks = tuple(ranks)
    transport.watch = _watch_of(group, ranks, rank, transport.abort)
    return transport


def part_of_transport(everyone: Transport, group: Any, scope: str) -> Transport:
    """A transport over some of the ranks of ``everyone``, watched together with it.

    Args:
        everyone: All ranks that make the same calls.
        group: The torch process group, of the same backend and for this transport alone where order matters.
        scope: Name of the group, unique among those of ``everyone``.
    """
    kind = GlooTransport if isinstance(everyone, GlooTransport) else NativeTransport
    transport = kind(group, dist.get_rank(group), dist.get_world_size(group))
    transport.ranks = tuple(dist.get_process_group_ranks(group))
    transport.scope = f"{scope}/"
    transport.members = tuple(everyone.ranks.index(rank) for rank in transport.ranks)
    transport.watch = everyone.watch
    transport.belongs_to(everyone)
    if everyone.watch is not None:
        everyone.watch.aborts[id(group)] = transport.abort
    return transport


_OUTSIDE_ENGINES = -1  # the owner of what is shared while there is no engine


def shared_transport(
    group: Any = None, *, device: torch.device | None = None, timeout: timedelta | None = None
) -> Transport:
    """The one transport of a group for what happens outside engines; arguments as of :func:`create_transport`."""
    if dist.is_initialized():
        group = group if group is not None else dist.group.WORLD
        known = _watches.get(id(group))
        if known is not None and known[0] is group and known[1].outside is not None:
            return known[1].outside
    transport = create_transport(group, device=device, timeout=timeout)
    transport.owner = _OUTSIDE_ENGINES
    if transport.watch is not None:
        transport.watch.outside = transport
    return transport


_watches: dict[int, tuple[Any, Watch]] = {}


def _watch_of(group: Any, ranks: list[int], rank: int, abort: Callable[[], None]) -> Watch:
    """The one watch of a process group: deadlocks between two engines on it are seen too."""
    for key, (old, watch) in list(_watches.items()):
        if not is_alive(old):
            watch.stop()
            del _watches[key]
    known = _watches.get(id(group))
    if known is None or known[0] is not group:
        scope = f"deepspeed/{'-'.join(map(str, ranks)) if len(ranks) <= 8 else hash(tuple(ranks))}"
        known = (group, Watch(rendezvous_store(), scope, rank, len(ranks), abort))
        _watches[id(group)] = known
    return known[1]


def backend_for(group: Any, device: torch.device | None) -> str:
    """Name of the backend for tensors of ``device``: ``gloo`` for the CPU of ``cpu:gloo,cuda:nccl``."""
    kind = device.type if device is not None else "cpu"
    by_device = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    return by_device.get(kind) or dist.get_backend(group)


def warm_up(transport: Transport) -> None:
    """Connects every pair of ranks once, so that the first step does not pay for it."""
    transport.gather_small(torch.zeros(1, dtype=torch.int64), channel="call", label="the engine's start")


__all__ = [
    "DoneWork",
    "GlooTransport",
    "LocalTransport",
    "NativeTransport",
    "Piece",
    "Transport",
    "Work",
    "create_transport",
    "Visit",
    "scaled_sum",
    "shared_transport",
    "warm_up",
]
