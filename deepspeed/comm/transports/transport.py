"""How slices of flat buffers are sent between the ranks of one group.

Numeric code requests three things: fill a buffer from every rank's slice (*gather*), reduce a buffer to the owner of
each slice (*reduce-scatter*), reduce a buffer to every rank (*all-reduce*). Each returns a ``Work``, whose ``wait`` may
be called more than once. A transport is chosen once per group (``deepspeed.comm.job.connect``):

- ``LocalTransport``: a group of one.
- ``GlooTransport`` (``deepspeed.comm.host.gloo``): tagged sends and receives straight into the slices, and reductions
  as an exchange of slices with a local sum in rank order in fp32. Both move the bytes of the collective, need no copy
  of the whole output, and give sums that do not depend on timing.
- ``SameHostTransport`` (``deepspeed.comm.host.shared_exchange``): the same, but what all hand to all goes through
  memory where all ranks are on one host.
- ``NativeTransport`` (``deepspeed.comm.transports.native``): the backend's own collectives (NCCL and similar backends).

Every rank of the group must make the same calls with the same keys; on gloo the order may differ, elsewhere it may not.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from typing_extensions import override

from deepspeed.axes import DATA
from deepspeed.comm.base.codec import Residual
from deepspeed.comm.base.counters import traffic, waiting
from deepspeed.comm.base.zero_rows import ZeroRows
from deepspeed.comm.transports import packing
from deepspeed.comm.transports.packing import Tensors, numel_of
from deepspeed.comm.watch.forward_queue import ForwardRequest
from deepspeed.comm.watch.watchdog import Watch
from deepspeed.comm.watch.watched_group import WatchedGroup
from deepspeed.errors import CommunicationError

CHUNK = 262144  # elements of a local sum: 1 MiB of fp32, so that operands stay in cache (64Ki was 15 % slower)
_TRANSFERS = 2  # kind of transfer, see transfer_key
OWNERS = 8  # engines whose transfers keep apart by tag; more engines reuse the tags in turn
_ROUNDS = 1 << 10
_BUCKETS = 1 << 15
SMALL_CHANNELS = ("order", "step", "call", "objects")
"""Streams of small exchanges: the order of gathers, the agreements of an update, calls that all ranks make alike, and
objects (``comm.transports.objects``), which another thread may exchange."""


Visit = Callable[[torch.Tensor], None]
"""What a reduction does with every part of its result while that is in the cache; it must not keep it."""


def transfer_key(owner: int, bucket: int, kind: int, count: int) -> int:
    """Returns the number that matches the sends and receives of one transfer (below 2**30).

    ``owner`` is the number of the engine, ``kind`` 0 for gathers, 1 for reductions, 2 for transfers, ``count`` the
    transfers of this bucket so far.
    """
    return ((owner % OWNERS * _BUCKETS + bucket % _BUCKETS) * _ROUNDS + count % _ROUNDS) * 4 + kind


class Work(Protocol):
    """A transfer in flight. It keeps its buffers alive."""

    def wait(self) -> None:
        """Blocks (host or current stream) until the result is in place. Later calls return at once."""

    def will_arrive(self) -> bool:
        """Returns whether all peers are known to have sent their part, so that waiting needs no further call."""


def poll(work: Work, seconds: float) -> bool | None:
    """Blocks the host, but no stream, until the device has finished a transfer, ``seconds`` at most.

    Returns whether it is finished; None, at once, of a transfer that no device runs.
    """
    method = getattr(work, "poll", None)
    return None if method is None else method(seconds)


def job_is_over(what: str) -> CommunicationError:
    """Returns the error for the use of something whose job is over; ``what`` was wanted."""
    return CommunicationError(
        f"{what}: the process group of this belongs to a job that is over (destroy_process_group was called). "
        "Make a new engine with deepspeed.initialize"
    )


class _ClosedGroup:
    """Stands where the process group of a job was that is over."""

    def __getattr__(self, name: str) -> Any:
        raise job_is_over("a transfer between ranks")


@dataclass(frozen=True)
class TensorTransfer:
    """One tensor in flight from one rank."""

    source: int  # group rank that has the values
    target: int | None  # group rank that gets them; None: all ranks
    # The values on the source, the place for them on a target; contiguous, of equal length and dtype. None on ranks
    # that have no part in it.
    tensor: torch.Tensor | None


@dataclass(frozen=True)
class Reduction:
    """Holds the settings of one reduction."""

    scale: float  # factor on the sum (1 / size for a mean)
    key: int  # number that is equal on all ranks for this reduction and for no other one in flight
    label: str  # what is transferred, for error messages
    limit: int  # most elements of the buffer that may be sent at once
    # called, at the latest in ``wait``, with parts that together are the result, each as soon as it is finished and a
    # multiple of 64 elements long
    visit: Visit | None = None
    error: Residual | None = None  # what earlier reductions of this buffer have lost; for transports that are not exact
    rows: ZeroRows | None = None  # its rows, for transports that cannot encode 0


class _UnpackingWork:
    """A transfer whose result is copied to where it belongs."""

    def __init__(self, work: Work, flat: torch.Tensor, places: Tensors) -> None:
        self._work, self._flat, self._places = work, flat, places

    def wait(self) -> None:
        self._work.wait()
        with torch.no_grad():
            packing.read(self._flat, self._places)
        self._flat, self._places = self._flat[:0], ()

    def will_arrive(self) -> bool:
        return self._work.will_arrive()


class DoneWork:
    """A transfer that needed nothing."""

    def wait(self) -> None:
        """Blocks until the transfer is done."""
        return

    def will_arrive(self) -> bool:
        """Returns True."""
        return True


@dataclass(frozen=True)
class FailedWork:
    """Stands for torch's ``Work`` where a transfer could not begin because the connection is closed."""

    error: RuntimeError

    def wait(self, *_patience: Any) -> None:
        """Raises the error of the connection; the watch then finds the cause."""
        raise self.error

    def is_completed(self) -> bool:
        """Returns False."""
        return False


def start_p2p(transfer: Callable[..., Any], tensor: torch.Tensor, peer: int, tag: int) -> Any:
    """Starts a process group's ``send`` or ``recv`` of ``tensor`` (contiguous, any shape).

    If the connection is closed, returns work whose ``wait()`` raises.
    """
    try:
        return transfer([tensor], peer, tag)
    except RuntimeError as error:
        return FailedWork(error)


class Transport:
    """Moves slices inside one group."""

    name = "local"
    small_device: torch.device | None = None  # where a tensor for gather_small may be besides the host
    # What is gathered is what was there. Otherwise it is what some codes stand for, on all ranks the same
    # (``comm.codecs.coded``): in this rank's own slice too.
    is_exact = True
    # Transfers must be issued in one order on all ranks, also between transports: see "Two NCCL communicators" in
    # docs/design/zero.md.
    needs_one_order = False
    runs_on_stream = False  # transfers run on a stream of the device, and so do waits for them
    # 16-bit buffers are reduced to their owners by an exchange and one sum in fp32, where the backend's own collective
    # would round at every rank on the way; on gloo they always are
    sums_exactly = False

    def __init__(self, group: Any, rank: int, size: int, axis: str = DATA) -> None:
        self.group = group  # the torch process group, or None for the transport of one rank
        self.rank = rank  # this rank in the group
        self.size = size
        self.axis = axis  # name of the axis that the ranks lie along, for the traffic counters
        self.ranks: tuple[int, ...] = ()  # numbers of the ranks in the job; empty for the transport of one rank
        self.owner = 0  # number of the engine that the transfers belong to; equal on all ranks
        self.watch: Watch | None = None  # the job's; None where no rank is waited for
        # how this rank takes part in the process group; None where it waits for no other
        self.watched: WatchedGroup | None = None
        self.started = 0  # collectives, sends and recvs that this transport has started in the process group so far
        self._moves = 0
        self.companion: Transport | None = None  # the transport of this engine's reductions
        # Set during backward, on all ranks alike: gathers on gloo also send how many reductions a rank has started, so
        # that its peers know which can complete (see ``Work.will_arrive``).
        self.confirms = False
        self.scope = ""  # begins the names of its channels
        self._peers: Transport | None = None

    @property
    def peers(self) -> Transport:
        """All ranks with the same part of the model, which make the same calls: this group, or a larger one."""
        return self if self._peers is None else self._peers

    def belongs_to(self, peers: Transport) -> None:
        """Sets the group of which this one is a part; transfers of both share one numbering."""
        self._peers, self.owner = peers, peers.owner

    def joins(self, watched: WatchedGroup) -> None:
        """Registers as which process group of the job it is watched."""
        self.ranks, self.scope, self.watched = watched.ranks, watched.scope, watched
        self.is_watched_by(watched.watch)

    def is_watched_by(self, watch: Watch | None) -> None:
        """Sets the watch that supervises its waits; it leaves the job when that ends."""
        self.watch = watch
        if watch is not None:
            watch.members.add(self)

    def leave(self) -> None:
        """Drops the process group at the end of the job, so that a remaining reference does not keep it alive."""
        self.group, self.watched = _ClosedGroup(), None

    def rank_at(self, position: int) -> int:
        """Returns the rank in the whole group of the rank that has the slice number ``position``."""
        return position

    def take_place_of(self, other: Transport) -> None:
        """Makes this one serve where ``other``, over the same group, would have served."""
        self.ranks, self.scope, self.watched = other.ranks, other.scope, other.watched
        self.is_watched_by(other.watch)
        self._peers = other._peers
        self.axis = other.axis

    def next_owner(self, users: str = "") -> int:
        """Returns a number for one more engine on this group; equal on all ranks if all make their engines together.

        ``users`` other than engines are counted by themselves.
        """
        return self.watch.next_owner(self.scope + users) if self.watch is not None else 0

    def issue(self, channel: str, key: int | None = None) -> tuple[str, int]:
        """Counts a transfer on one of this engine's channels; ``key`` as in ``Watch.issue``."""
        full_name = f"{self.owner}/{self.scope}{channel}"
        return full_name, self.watch.issue(full_name, key) if self.watch is not None else 0

    def guard(self, blocking: Callable[[], Any], ticket: tuple[str, int], label: str) -> None:
        """Runs a blocking wait for the transfer ``ticket``, supervised."""
        if waiting.is_running:
            waiting.run(lambda: self._guard(blocking, ticket, label), self.axis, label)
        else:
            self._guard(blocking, ticket, label)

    def _guard(self, blocking: Callable[[], Any], ticket: tuple[str, int], label: str) -> None:
        if self.watch is None:
            blocking()
        else:
            self.watch.wait(blocking, *ticket, label, self.ranks, on_stream=self.runs_on_stream)

    def enqueue_forward(self, request: ForwardRequest) -> None:
        """Adds what this rank must hand on to others before it blocks in anything else."""
        assert self.watch is not None
        self.watch.forward_queue.add(request)

    def progress_pending(self, last: ForwardRequest | None = None) -> None:
        """Hands on what this rank has promised, up to ``last``; see ``ForwardQueue.progress_pending``."""
        if self.watch is not None:
            self.watch.forward_queue.progress_pending(last)

    def my_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this rank's slice of a flat buffer, as a view."""
        length = flat.numel() // self.size
        return flat.narrow(0, self.rank * length, length)

    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        """Fills ``flat`` (1-D, any dtype) from its ``size`` equal slices; this rank's own slice must be in place.

        ``key`` is a number that is equal on all ranks for this gather and for no other one in flight; ``label`` says
        what is transferred, for error messages.
        """
        raise NotImplementedError

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        """Sums every rank's ``flat`` and leaves ``how.scale`` times this rank's slice of the sum in ``out``.

        ``flat`` is 1-D, of ``size`` equal slices in the reduce dtype, and unchanged afterwards unless documented;
        ``out`` is 1-D fp32, one slice.
        """
        raise NotImplementedError

    def all_reduce(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        """Sums every rank's ``flat`` and leaves ``how.scale`` times the sum in ``out`` (fp32, same length)."""
        raise NotImplementedError

    def sum_in_place(self, flat: torch.Tensor, label: str) -> Work | None:
        """Begins to replace ``flat`` by the sum of every rank's, by one call of the backend that keeps the dtype.

        Every rank must call it, in one order. None, with nothing begun: :meth:`all_reduce` is no slower.
        """
        return None

    def swap(self, flat: torch.Tensor, out: torch.Tensor, *, key: int, label: str) -> Work:
        """Starts an all-to-all of equal slices: rank *r* receives slice *r* of every rank's ``flat``.

        It is the first half of a reduction, of the number ``key``, that codecs make themselves; :meth:`share` is the
        second. ``out`` (1-D, as long and of the same dtype) receives the slices for this rank, in rank order.
        """
        raise NotImplementedError

    def share(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        """Starts an all-gather into ``flat`` (1-D), as :meth:`all_gather`: the second half of the reduction ``key``."""
        raise NotImplementedError

    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        """Returns every rank's small 1-D tensor as rows of a 2-D one on the host; blocks.

        Args:
            tensor: On the host or on :attr:`small_device`, of equal length on all ranks that use ``channel``.
            channel: One of ``SMALL_CHANNELS``; exchanges of one channel never meet those of another.
            label: What this rank is about to do, shown if a rank waits in vain.
        """
        raise NotImplementedError

    def start_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> Callable[[], torch.Tensor]:
        """Starts a :meth:`gather_small` of a 1-D ``tensor``, without blocking where the transport can.

        Returns a function that waits for the rows and returns them, 2-D on the host.
        """
        rows = self.gather_small(tensor, channel=channel, label=label)
        return lambda: rows

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> None:
        """Overwrites ``tensor`` (contiguous, any shape) with that of group rank ``source``; blocks."""
        raise NotImplementedError

    def record_broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Counts a broadcast of ``tensor``, of any shape: group rank ``source`` sends it once."""
        nbytes = tensor.numel() * tensor.element_size()
        traffic.record_requested("broadcast", nbytes, self.axis)
        traffic.record_ran("broadcast", nbytes if source == self.rank else 0, self.axis)

    def move(self, transfers: Sequence[TensorTransfer], *, label: str) -> None:
        """Sends and receives many tensors in one round; blocks.

        Every rank must call it, with the transfers that it takes part in, in the same order as their other ranks;
        a rank may take part in none. A transfer from a rank to itself is left to the caller.
        """
        raise NotImplementedError

    def all_to_all(
        self, source: torch.Tensor, sent: Sequence[int], out: torch.Tensor, received: Sequence[int], *, label: str
    ) -> Work:
        """Hands out consecutive rows of ``source``, and fills ``out`` with those that the ranks hand to this one.

        Every rank must call it, as often and in the same order; any of the counts may be 0. Autograd does not see it.

        Args:
            source: Contiguous; its rows are along the first dimension.
            sent: How many rows go to each rank, in order; together they are all.
            out: Contiguous, of the same dtype and row length; not ``source``.
            received: How many rows come from each rank: as that rank announces.
        """
        raise NotImplementedError

    def staging_buffer(self, numel: int, like: torch.Tensor, *, label: str) -> torch.Tensor:
        """Returns memory for the data of the very next :meth:`exchange`; saves a copy where ranks share memory.

        It is 1-D: ``numel`` elements for all other ranks together; what they get lies there in their order.
        """
        return like.new_empty(numel)

    def exchange(
        self, leaving: Sequence[Tensors], arriving: Sequence[Tensors], like: torch.Tensor, *, label: str
    ) -> Work:
        """Sends tensors to every rank, and fills tensors with what the ranks send to this one.

        Every rank must call it, as often and in the same order. Autograd does not see it.

        Args:
            leaving: By rank, tensors of any strides; there may be none.
            arriving: By rank, memory for as many elements as that rank announces for this one; for those of this rank
                itself, tensors of the same shapes as leave.
            like: Has the dtype in which they are sent, which is that of ``arriving``, and their device.
        """
        sent, received = ([numel_of(part) for part in parts] for parts in (leaving, arriving))
        flat = [tensor for part in leaving for tensor in part]
        source = packing.in_place(flat, like.dtype)
        if source is None:
            source = like.new_empty(sum(sent))
            with torch.no_grad():
                packing.write(flat, source)
        places = [tensor for part in arriving for tensor in part]
        out = packing.in_place(places, like.dtype)
        if out is not None:
            return self.all_to_all(source, sent, out, received, label=label)
        out = like.new_empty(sum(received))
        return _UnpackingWork(self.all_to_all(source, sent, out, received, label=label), out, places)

    def next_move(self, label: str = "") -> int:
        """Returns the key of the next round of transfers.

        With a label (equal on all ranks) rounds of different things never meet: ranks that took different branches
        wait, and are named, where tensors of other sizes would end the process.
        """
        self._moves += 1
        return transfer_key(self.owner, zlib.crc32(label.encode()) if label else 0, _TRANSFERS, self._moves)


def scaled_sum(parts: list[torch.Tensor], out: torch.Tensor, scale: float, visit: Visit | None = None) -> None:
    """Computes ``out = scale * (parts[0] + parts[1] + ...)`` in fp32, left to right, in cache-sized chunks.

    ``parts`` are 1-D tensors of equal length and any floating dtype, ``out`` is 1-D fp32 and may be the first of them.
    ``visit`` is called with every finished chunk while it is in the cache, a multiple of 64 elements if ``out`` is one.
    """
    numel = out.numel()
    chunk = CHUNK if out.device.type == "cpu" else numel
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
    """A group of one rank: nothing is sent."""

    name = "local"

    def __init__(self) -> None:
        super().__init__(None, 0, 1)

    @override
    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        return DoneWork()

    @override
    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        scaled_sum([flat], out, how.scale, how.visit)
        return DoneWork()

    all_reduce = reduce_scatter

    @override
    def all_to_all(
        self, source: torch.Tensor, sent: Sequence[int], out: torch.Tensor, received: Sequence[int], *, label: str
    ) -> Work:
        out.copy_(source)
        return DoneWork()

    @override
    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        return tensor.unsqueeze(0)

    @override
    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> None:
        return

    @override
    def move(self, transfers: Sequence[TensorTransfer], *, label: str) -> None:
        return
