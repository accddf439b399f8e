"""Ranks that are processes: process groups that behave as NCCL's do, for tests with ``run_ranks``.

- A transfer is queued on a stream of its communicator, behind what the current stream has queued; the call returns at
  once, and so does ``wait``, which puts the current stream behind the transfer.
- One communicator carries its transfers in one order. Ranks that queue different ones wait for each other until the
  communicator is aborted; then the transfers end without an error, and their buffers are as they were. ``abort``
  returns when nothing runs on the device any more, also no transfer of another communicator.
- ``send`` and ``recv`` use a communicator of the two ranks, with one stream for both directions. It is made by the
  first of them, which blocks the host until the other rank has made its first one too.

What travels goes through the rendezvous store, so models must be small.
"""

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.harness.device.clocks import Clocks, Event, Stream
from tests.harness.device.jobs import POLL, Aborted, Job, JobQueue
from tests.harness.device.operations import Operations
from tests.harness.device.places import Place

BACKEND = "simulated"

_device: tuple[Clocks, Operations] | None = None


class _Work:
    """A transfer on its way; keeps its tensors until it is waited for."""

    def __init__(self, clocks: Clocks, done: Event, job: Job, tensors: Any) -> None:
        self._clocks, self._done, self._job, self._tensors = clocks, done, job, tensors

    def wait(self, _timeout: Any = None) -> bool:
        self._clocks.current.wait_event(self._done)
        self._tensors = None
        return True

    def is_completed(self) -> bool:
        return self._job.is_over

    def is_success(self) -> bool:
        return self._job.is_over


class _Line:
    """One communicator of one rank: a stream with its queue."""

    def __init__(self, name: str, place: tuple[int, int], store: Any) -> None:
        assert _device is not None, "a simulated group belongs inside simulated_rank()"
        self.clocks, self.operations = _device
        self.rank, self.size = place
        self.stream: Stream = self.clocks.new_stream(name)
        self.queue = JobQueue(name)
        self._store = store
        self.count = 0

    def start(
        self,
        what: str,
        run: Callable[[Callable[[bytes], list[bytes]]], None],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        *,
        sizes_match: bool = True,
    ) -> _Work:
        """Queues a transfer; ``run`` is given what hands bytes to all ranks and returns those of all."""
        tensors = (*reads, *writes)
        for tensor in tensors:
            if not self.operations.is_on_device(tensor):
                raise RuntimeError(f"No backend type associated with device type cpu (shape {tuple(tensor.shape)})")
        self.stream.wait_stream(self.clocks.current)
        for some, is_written in ((reads, False), (writes, True)):
            for tensor in some:
                self.operations.touch(tensor, self.stream, Place(what), writes=is_written)
        number, self.count = self.count, self.count + 1
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors] if sizes_match else []
        signature = f"{what} {sizes}"
        job = self.queue.put(lambda: run(lambda mine: self._exchange(number, signature, mine)), self.stream.jobs)
        self.stream.jobs = (job,)
        for tensor in tensors:
            self.operations.hold(tensor, job)
        return _Work(self.clocks, self.stream.record_event(), job, tensors)

    def _exchange(self, number: int, signature: str, mine: bytes) -> list[bytes]:
        key = f"{number}/{signature}"  # another transfer under this number is never found
        self._store.set(f"{key}/{self.rank}", mine)
        return [self._fetch(f"{key}/{rank}") for rank in range(self.size)]

    def _fetch(self, key: str) -> bytes:
        while not self._store.check([key]):
            if self.queue.is_aborted:
                raise Aborted
            time.sleep(POLL)
        found: bytes = self._store.get(key)
        return found


class SimulatedGroup(dist.ProcessGroup):
    """A process group of this backend; see the module.

    Attributes:
        pairs: Communicators of two ranks that ``send`` and ``recv`` have made, by the ranks.
    """

    def __init__(self, store: Any, rank: int, size: int, _timeout: Any) -> None:
        super().__init__(rank, size)
        self._store = store
        self._line = _Line("the stream of a group", (rank, size), dist.PrefixStore("all", store))
        self.pairs: dict[tuple[int, int], _Line] = {}
        self._name = ""

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _get_sequence_number_for_group(self) -> int:
        """Returns how many collectives this rank has queued."""
        return self._line.count

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> _Work:
        (tensor,) = tensors
        reduce_op = getattr(options, "reduceOp", dist.ReduceOp.SUM)

        def run(exchange: Any) -> None:
            _write(tensor, _reduced(exchange(_read(tensor)), tensor.dtype, reduce_op))

        return self._line.start("all_reduce", run, [tensor], [tensor])

    def _allgather_base(self, flat: torch.Tensor, mine: torch.Tensor, _options: Any = None) -> _Work:
        def run(exchange: Any) -> None:
            _write(flat, b"".join(exchange(_read(mine))))

        return self._line.start("all_gather", run, [mine], [flat])

    def _reduce_scatter_base(self, out: torch.Tensor, flat: torch.Tensor, options: Any = None) -> _Work:
        reduce_op = getattr(options, "reduceOp", dist.ReduceOp.SUM)

        def run(exchange: Any) -> None:
            total = _reduced(exchange(_read(flat)), flat.dtype, reduce_op)
            part = len(total) // self.size()
            _write(out, total[self.rank() * part : (self.rank() + 1) * part])

        return self._line.start("reduce_scatter", run, [flat], [out])

    def alltoall_base(
        self, out: torch.Tensor, source: torch.Tensor, received: list[int], sent: list[int], _options: Any = None
    ) -> _Work:
        def run(exchange: Any) -> None:
            parts = []
            for header in exchange(_with_lengths(_read(source), _lengths(source, sent, self.size()))):
                parts.append(_part(header, self.rank()))
            _write(out, b"".join(parts))

        return self._line.start("all_to_all", run, [source], [out], sizes_match=not received)

    def broadcast(self, tensors: list[torch.Tensor], options: Any = None) -> _Work:
        (tensor,) = tensors
        root = getattr(options, "rootRank", 0)

        def run(exchange: Any) -> None:
            _write(tensor, exchange(_read(tensor) if self.rank() == root else b"")[root])

        reads, writes = ([tensor], []) if self.rank() == root else ([], [tensor])
        return self._line.start("broadcast", run, reads, writes)

    def barrier(self, opts: Any = None) -> _Work:
        return self._line.start("barrier", lambda exchange: exchange(b""), [], [])

    def send(self, tensors: list[torch.Tensor], peer: int, _tag: int = 0) -> _Work:
        (tensor,) = tensors
        return self._pair(peer).start("P2P", lambda exchange: exchange(_read(tensor)) and None, [tensor], [])

    def recv(self, tensors: list[torch.Tensor], peer: int, _tag: int = 0) -> _Work:
        (tensor,) = tensors
        line = self._pair(peer)
        return line.start("P2P", lambda exchange: _write(tensor, exchange(b"")[1 - line.rank]), [], [tensor])

    def _pair(self, peer: int) -> _Line:
        ranks = (min(peer, self.rank()), max(peer, self.rank()))
        if ranks not in self.pairs:
            store = dist.PrefixStore(f"pair {ranks}", self._store)
            self.pairs[ranks] = line = _Line(f"the stream of ranks {ranks}", (ranks.index(self.rank()), 2), store)
            store.set(f"made/{line.rank}", b"")
            line._fetch(f"made/{1 - line.rank}")  # blocks the host
        return self.pairs[ranks]

    def abort(self) -> None:
        for line in (self._line, *self.pairs.values()):
            line.queue.abort()
        for stream in list(self._line.clocks.streams):  # NCCL frees memory, which waits for all that the device does
            for job in stream.jobs:
                job.wait()

    def shutdown(self) -> None:
        for line in (self._line, *self.pairs.values()):
            line.queue.abort()
            line.queue.close()

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    # Torch 2.13 has these names for them.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base


def _read(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size()) if tensor.numel() else b""


def _write(tensor: torch.Tensor, data: bytes) -> None:
    assert len(data) == tensor.numel() * tensor.element_size(), (len(data), tensor.shape, tensor.dtype)
    ctypes.memmove(tensor.data_ptr(), data, len(data))


def _reduced(parts: list[bytes], dtype: torch.dtype, how: Any) -> bytes:
    """The sum or the like, in the tensor's own dtype and in rank order."""
    if not parts[0]:
        return b""
    tensors = [torch.frombuffer(bytearray(part), dtype=dtype) for part in parts]
    total = tensors[0]
    for other in tensors[1:]:
        if how == dist.ReduceOp.MAX:
            total = torch.maximum(total, other)
        elif how == dist.ReduceOp.MIN:
            total = torch.minimum(total, other)
        else:
            assert how in (dist.ReduceOp.SUM, dist.ReduceOp.AVG), how
            total = total + other
    if how == dist.ReduceOp.AVG:
        total = total / len(tensors)
    return _read(total)


def _lengths(source: torch.Tensor, sent: list[int], size: int) -> list[int]:
    row = source[:1].numel() * source.element_size()
    rows = sent or [len(source) // size] * size
    return [count * row for count in rows]


def _with_lengths(data: bytes, lengths: list[int]) -> bytes:
    return repr(lengths).encode() + b";" + data


def _part(message: bytes, rank: int) -> bytes:
    header, _, data = message.partition(b";")
    lengths = [int(word) for word in header.strip(b"[]").split(b",")]
    start = sum(lengths[:rank])
    return data[start : start + lengths[rank]]


def _make(store: Any, rank: int, size: int, timeout: Any) -> SimulatedGroup:
    return SimulatedGroup(store, rank, size, timeout)


@contextmanager
def connected(clocks: Clocks, operations: Operations) -> Iterator[None]:
    """Makes a group of this backend the default process group inside; reads RANK, WORLD_SIZE and MASTER_PORT."""
    global _device
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, devices=["cpu", "cuda"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, is_master=rank == 0)
    _device = clocks, operations
    clocks.has_peers = True
    dist.init_process_group(BACKEND, store=dist.PrefixStore("job", store), rank=rank, world_size=size)
    groups = dist.distributed_c10d._world.pg_map
    try:
        yield
        dist.barrier()  # the store is rank 0's
        clocks.synchronize()
    finally:
        for group in list(groups):
            if isinstance(group, SimulatedGroup):
                group.shutdown()
        _device = None
