"""Times gloo's own collectives beside the sends and receives that ``deepspeed.comm`` uses instead, on the CPU.

Each rank has a flat bf16 buffer. Variants:

- gather: ``all_gather_into_tensor``; tagged sends and receives directly into the slices of the output;
- reduce-scatter: ``reduce_scatter_tensor``; ``all_reduce``, of which each rank takes its slice; exchange of slices with
  a local fp32 sum in rank order, after all slices have arrived or by cache-sized chunks while later ones arrive;
- ours: both operations of ``deepspeed.comm.transports.transport``; its reduction has an fp32 result.

The variants take turns, so that other load of the machine affects all alike. ``--help`` shows the options.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import Reduction

_CHUNK_NUMEL = 128 * 1024  # 256 KiB of bf16 and 512 KiB of fp32: fits a second-level cache


def gather_native(full: Tensor, rank: int, world_size: int) -> None:
    """Gathers ``full`` [n] from the slices of all ranks; gloo gathers into its own buffers and copies."""
    numel = full.numel() // world_size
    dist.all_gather_into_tensor(full, full[rank * numel : (rank + 1) * numel])


def gather_tagged(full: Tensor, rank: int, world_size: int) -> None:
    """Gathers ``full`` [n] from the slices of all ranks, received in place."""
    slices = full.chunk(world_size)
    works = []
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        works.append(dist.irecv(slices[source], source, tag=7))
        works.append(dist.isend(slices[rank], target, tag=7))
    _wait_all(works)


def _wait_all(works: Iterable[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def scatter_native(full: Tensor, rank: int, world_size: int) -> Tensor:
    """Sums slice ``rank`` over all ranks, in bf16."""
    mine = torch.empty(full.numel() // world_size, dtype=full.dtype)
    dist.reduce_scatter_tensor(mine, full)
    return mine


def scatter_all_reduce(full: Tensor, rank: int, world_size: int) -> Tensor:
    """Computes the same by an all-reduce of the whole buffer."""
    dist.all_reduce(full)
    return full.chunk(world_size)[rank]


def scatter_exchange(full: Tensor, rank: int, world_size: int) -> Tensor:
    """Computes the same by an exchange of slices, which are added in rank order in fp32."""
    slices = full.chunk(world_size)
    arrived = {source: torch.empty_like(slices[0]) for source in range(world_size) if source != rank}
    works = []
    for distance in range(1, world_size):
        source, target = (rank - distance) % world_size, (rank + distance) % world_size
        works.append(dist.irecv(arrived[source], source, tag=8))
        works.append(dist.isend(slices[target], target, tag=8))
    _wait_all(works)
    arrived[rank] = slices[rank]
    total = arrived[0].float()
    for source in range(1, world_size):
        total += arrived[source]
    return total.bfloat16()


def scatter_exchange_chunked(full: Tensor, rank: int, world_size: int) -> Tensor:
    """Computes the same in chunks: adds a chunk, which is in the cache, while later ones arrive."""
    slices = full.chunk(world_size)
    arrived = {source: torch.empty_like(slices[0]) for source in range(world_size) if source != rank}
    chunks = max(1, min(8, slices[0].numel() // _CHUNK_NUMEL))
    bounds = [slices[0].numel() * index // chunks for index in range(chunks + 1)]
    sends, receives = [], []
    for index in range(chunks):
        chunk = slice(bounds[index], bounds[index + 1])
        row = []
        for distance in range(1, world_size):
            source, target = (rank - distance) % world_size, (rank + distance) % world_size
            row.append(dist.irecv(arrived[source][chunk], source, tag=16 + index))
            sends.append(dist.isend(slices[target][chunk], target, tag=16 + index))
        receives.append(row)
    arrived[rank] = slices[rank]
    result = torch.empty_like(slices[0])
    scratch = torch.empty(_CHUNK_NUMEL)
    for index, row in enumerate(receives):
        _wait_all(row)
        for start in range(bounds[index], bounds[index + 1], _CHUNK_NUMEL):
            stop = min(start + _CHUNK_NUMEL, bounds[index + 1])
            total = scratch[: stop - start].copy_(arrived[0][start:stop])
            for source in range(1, world_size):
                total += arrived[source][start:stop]
            result[start:stop].copy_(total)
    _wait_all(sends)
    return result


def ours_gather(full: Tensor, rank: int, world_size: int) -> None:
    """Runs the all-gather that stage 3 calls."""
    Job.adopt().axis_of().transport().all_gather(full, key=9, label="the benchmark").wait()


def ours_scatter(full: Tensor, rank: int, world_size: int) -> Tensor:
    """Runs the reduce-scatter that stages 2 and 3 call; the result is fp32."""
    mine = torch.empty(full.numel() // world_size)
    transport = Job.adopt().axis_of().transport()
    reduction = Reduction(scale=1.0, key=10, label="the benchmark", limit=full.numel())
    transport.reduce_scatter(full, mine, reduction).wait()
    return mine


VARIANTS: dict[str, Callable[[Tensor, int, int], Tensor | None]] = {
    "all_gather_into_tensor": gather_native,
    "tagged send/recv": gather_tagged,
    "ours, gather": ours_gather,
    "reduce_scatter_tensor": scatter_native,
    "all_reduce": scatter_all_reduce,
    "exchange + fp32 sum": scatter_exchange,
    "exchange + fp32 sum, chunked": scatter_exchange_chunked,
    "ours, reduce-scatter": ours_scatter,
}


def _check(rank: int, world_size: int) -> None:
    """Checks the result of every variant; small integers are exact in bf16.

    Raises:
        RuntimeError: A result is wrong.
    """
    numel = 4 * world_size * 65536
    for name, variant in VARIANTS.items():
        full = torch.full((numel,), float(rank + 1), dtype=torch.bfloat16)
        reduced = variant(full, rank, world_size)
        if reduced is None:
            expected = torch.arange(1, world_size + 1).repeat_interleave(numel // world_size).bfloat16()
        else:
            expected = torch.full((numel // world_size,), world_size * (world_size + 1) / 2, dtype=torch.bfloat16)
        if not torch.equal((full if reduced is None else reduced).bfloat16(), expected):
            raise RuntimeError(f"{name} gives a wrong result on rank {rank} of {world_size}")


def _rank_main(rank: int, world_size: int, nbytes: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    # The baseline uses names that torch deprecates.
    warnings.filterwarnings("ignore", message=".*is deprecated", category=FutureWarning)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    _check(rank, world_size)
    full = torch.zeros(nbytes // 2 // (64 * world_size) * 64 * world_size, dtype=torch.bfloat16)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for index in range(rounds + 2):
        for name, variant in VARIANTS.items():
            dist.barrier()
            start = time.perf_counter()
            variant(full, rank, world_size)
            mine = torch.tensor([time.perf_counter() - start])
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            if index >= 2:  # the first two rounds open connections and touch memory
                seconds[name].append(mine.item())
    if rank == 0:
        with open(f"{folder}/seconds.json", "w") as file:
            json.dump(seconds, file)
    dist.barrier()
    dist.destroy_process_group()


def measure(world_size: int, nbytes: int, rounds: int) -> dict[str, list[float]]:
    """Returns by variant the seconds of the slowest rank in every round."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (world_size, nbytes, rounds, folder), nprocs=world_size)
        with open(f"{folder}/seconds.json") as file:
            return json.load(file)


def main() -> None:
    """Prints a table with a column per number of ranks and size, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, separated by commas (default 2,4)")
    parser.add_argument("--megabytes", default="6,48", help="sizes of the flat bf16 buffer (default 6,48)")
    parser.add_argument("--rounds", type=int, default=15, help="timed calls per variant (default 15)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per column instead of a table")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    columns: dict[str, dict[str, list[float]]] = {}
    for world_size in map(int, arguments.ranks.split(",")):
        for megabytes in map(float, arguments.megabytes.split(",")):
            seconds = measure(world_size, int(megabytes * 1e6), arguments.rounds)
            columns[f"{world_size} ranks, {megabytes:g} MB"] = seconds
            if arguments.json:
                sys.stdout.write(json.dumps({"ranks": world_size, "megabytes": megabytes, "seconds": seconds}) + "\n")
    if arguments.json:
        return
    table = Table("", *columns, title="median ms (quartiles) of the slowest rank", title_justify="left")
    for name in VARIANTS:
        cells = []
        for seconds in columns.values():
            lower, middle, upper = (
                1e3 * value for value in statistics.quantiles(seconds[name], n=4, method="inclusive")
            )
            cells.append(f"{middle:.1f} ({lower:.1f}-{upper:.1f})")
        table.add_row(name, *cells)
    Console(width=max(Console().width, 120)).print(table)


if __name__ == "__main__":
    main()
