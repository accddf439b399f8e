"""Several ranks in one process, and tensors laid out over them in flat runs."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from deepspeed import comm
from deepspeed.comm.transports.transport import DoneWork
from deepspeed.ops.fragments import FragmentTable, SharedTensor, TensorFragment

ALIGNMENT = 64

SHAPES = [(24, 10), (10, 24), (16, 16), (3, 2, 5, 5), (64, 3), (7, 9), (40, 5)]


class ThreadedAxis:
    """Ranks as threads along an axis; each collective is two barriers around shared slots."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.calls = []
        self.group = self
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._slots = [None] * world_size
        self._local = threading.local()

    def run(self, fn):
        """``fn(rank)`` on every rank; the results in rank order."""

        def on_rank(rank):
            self._local.rank = rank
            torch.set_num_threads(1)
            try:
                return fn(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.world_size) as pool:
            futures = [pool.submit(on_rank, rank) for rank in range(self.world_size)]
        errors = [future.exception() for future in futures if future.exception()]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]

    def exchange(self, name, value, numel):
        rank = self._local.rank
        if rank == 0:
            self.calls.append((name, numel))
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def channel(self, _device):
        return ThreadedTransport(self)

    def transport(self, _use, *, device):
        return ThreadedTransport(self)

    @property
    def rank(self):
        return self._local.rank


class ThreadedTransport:
    """Transport and channel over a :class:`ThreadedAxis`."""

    def __init__(self, group):
        self._group = group

    def sum(self, values, label):
        return sum(self._group.exchange("all_reduce", values.clone(), values.numel()))

    def all_to_all(self, source, sent, out, received, *, label):
        parts = self._group.exchange("all_to_all_single", source.clone().split(sent), source.numel())
        arrived = [part[self._group.rank] for part in parts]
        assert [part.numel() for part in arrived] == received
        out.copy_(torch.cat(arrived))
        return DoneWork()


def use_threaded_collectives(monkeypatch):
    """Lets the exchanges of optimizers work on a :class:`ThreadedAxis`."""
    monkeypatch.setattr(comm, "get_backend", lambda group=None: "gloo")


class Layout:
    """Tensors end to end at multiples of 64, cut at ``cuts`` (multiples of 64; default equal parts) into runs."""

    def __init__(self, shapes, world_size, cuts=None):
        self.shapes = [tuple(shape) for shape in shapes]
        self.starts = []
        position = 0
        for shape in self.shapes:
            self.starts.append(position)
            position += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        block = ALIGNMENT * world_size
        self.numel = -(-position // block) * block
        equal = [self.numel // world_size * rank for rank in range(1, world_size)]
        self.bounds = [0, *(equal if cuts is None else cuts), self.numel]
        self.world_size = world_size

    def flat(self, tensors):
        buffer = torch.zeros(self.numel)
        for start, tensor in zip(self.starts, tensors, strict=True):
            buffer[start : start + tensor.numel()] = tensor.reshape(-1)
        return buffer

    def slice_of(self, tensors, rank):
        return self.flat(tensors)[self.bounds[rank] : self.bounds[rank + 1]].clone()

    def fragments(self, rank):
        first, last = self.bounds[rank], self.bounds[rank + 1]
        found = []
        for index, (start, shape) in enumerate(zip(self.starts, self.shapes, strict=True)):
            begin, end = max(start, first), min(start + math.prod(shape), last)
            if begin < end:
                found.append(TensorFragment(f"t{index}", index, begin - first, end - first, begin - start, shape))
        return tuple(found)

    def table(self, run, rank, group):
        ranks = range(self.world_size)
        return FragmentTable({id(run): self.fragments(rank)}, len(self.shapes), group, self.shared(), ranks, rank)

    def shared(self):
        return tuple(
            SharedTensor(f"t{index}", index, shape, 0, start, self.bounds)
            for index, (start, shape) in enumerate(zip(self.starts, self.shapes, strict=True))
        )

    def tensors(self, runs):
        whole = torch.cat(list(runs))
        return [
            whole[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(self.starts, self.shapes, strict=True)
        ]
