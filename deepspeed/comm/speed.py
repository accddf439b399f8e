"""Times collectives between the present ranks, for ``ds_bench``."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.base.device import local_device
from deepspeed.comm.base.recorder import bandwidths
from deepspeed.comm.job.connect import channel_over
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import Reduction, Transport

_ALIGNED = 64  # elements; slices begin at multiples of it, as in the engine's buckets
_KEY = 9


@dataclass(frozen=True)
class CollectiveSpeed:
    """One operation at one size."""

    operation: str  # its name
    nbytes: int  # bytes of the whole buffer, on each rank
    seconds: float  # median (or another statistic) over the trials of the slowest rank's time
    algorithm_gbps: float  # gigabits of the buffer per second
    bus_gbps: float  # gigabits per second that pass each rank's link, by the usual definition


Call = Callable[[torch.Tensor, Transport], object]


def _slice(full: torch.Tensor) -> torch.Tensor:
    return full.chunk(comm.get_world_size())[comm.get_rank()]


def _pair(full: torch.Tensor, _transport: Transport) -> None:
    """Sends from rank 0 to rank 1; the others wait for the next trial."""
    if comm.get_rank() == 0:
        comm.send(full, 1)
    elif comm.get_rank() == 1:
        comm.recv(full, 0)


def _engine_reduce_scatter(full: torch.Tensor, transport: Transport) -> None:
    mine = torch.empty(_slice(full).shape, dtype=torch.float32, device=full.device)
    how = Reduction(scale=1.0, key=_KEY + 1, label="the benchmark", limit=full.numel())
    transport.reduce_scatter(full, mine, how).wait()


OPERATIONS: dict[str, Call] = {
    "all_reduce": lambda full, _: comm.all_reduce(full),
    "all_gather": lambda full, _: comm.all_gather_into_tensor(full, _slice(full).clone()),
    "reduce_scatter": lambda full, _: comm.reduce_scatter_tensor(torch.empty_like(_slice(full)), full),
    "all_to_all": lambda full, _: comm.all_to_all_single(torch.empty_like(full), full),
    "broadcast": lambda full, _: comm.broadcast(full, 0),
    "pt2pt": _pair,
    "all_gather of the engine": lambda full, transport: transport.all_gather(
        full, key=_KEY, label="the benchmark"
    ).wait(),
    "reduce_scatter of the engine": _engine_reduce_scatter,
}
"""Calls by name; those of the engine are ZeRO's transfers, which on gloo differ from torch's collectives."""


def measure_collectives(
    operations: list[str],
    nbytes: int,
    dtype: torch.dtype,
    *,
    warmups: int = 5,
    trials: int = 20,
    statistic: Callable[[list[float]], float] = statistics.median,
) -> list[CollectiveSpeed]:
    """Times some of :data:`OPERATIONS` between all ranks of the process group. Every rank must call it alike.

    Args:
        nbytes: Size of the buffer, rounded up so that it can be cut into equal slices.
        warmups: Calls before the first that counts; they open connections and touch memory.
        trials: Calls that count.
        statistic: Combines the trials' seconds, such as the median.

    Returns:
        A row per operation, the same on every rank.
    """
    device = local_device()
    ranks = comm.get_world_size()
    whole = ranks * _ALIGNED
    numel = max(-(-nbytes // dtype.itemsize // whole), 1) * whole
    full = torch.zeros(numel, dtype=dtype, device=device)
    transport = _transport(device)
    rows = []
    for name in operations:
        call = functools.partial(OPERATIONS[name], full, transport)
        seconds = statistic(_slowest_of(call, device, warmups, trials))
        size = numel * dtype.itemsize
        rows.append(CollectiveSpeed(name, size, seconds, *bandwidths(name, size, seconds, ranks)))
    return rows


def measure_sums(
    sizes: Sequence[int],
    dtype: torch.dtype,
    *,
    warmups: int = 5,
    trials: int = 20,
    statistic: Callable[[list[float]], float] = statistics.median,
) -> list[float]:
    """Times sums of activations between all ranks, as ranks that share layers make them. Every rank must call it alike.

    Ranks of one host sum through shared memory, unlike the collectives of :func:`measure_collectives`, whose further
    arguments are the same. ``sizes`` are the bytes of the summands.

    Returns:
        Seconds of the slowest rank by size, the same on every rank.
    """
    device = local_device()
    channel = channel_over(_transport(device))
    found = []
    for nbytes in sizes:
        values = torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=device)
        call = functools.partial(channel.sum, values, "the benchmark")
        found.append(statistic(_slowest_of(call, device, warmups, trials)))
    return found


def _transport(device: torch.device) -> Transport:
    """Returns a new transport between all ranks."""
    job = Job.adopt()
    with job.process_groups.leased():
        return job.axis_of().transport(device=device)


def _slowest_of(call: Callable[[], object], device: torch.device, warmups: int, trials: int) -> list[float]:
    """Returns the seconds of the slowest rank in each trial."""
    accelerator = get_accelerator()
    slowest = []
    for trial in range(warmups + trials):
        comm.barrier()
        accelerator.synchronize()
        start = time.perf_counter()
        call()
        accelerator.synchronize()
        mine = torch.tensor([time.perf_counter() - start], device=device)
        comm.all_reduce(mine, op=comm.ReduceOp.MAX)
        if trial >= warmups:
            slowest.append(float(mine))
    return slowest
