"""Measures a machine with three probes: a block, an all-gather and a reduce-scatter; on processors also a sum."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from deepspeed import comm
from deepspeed.accelerator.devices import CONTENTION_OF_PROCESSORS, Device, DeviceEfficiency, device_of_product
from deepspeed.comm.base.device import local_device
from deepspeed.comm.speed import CollectiveSpeed, measure_collectives, measure_sums
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.decoder import DecoderShape
from deepspeed.plan.measuring.block_probe import BlockSpeed, ProbeSizes, probe_block
from deepspeed.plan.timeline.operation_cost import OperationKind

GATHER, SCATTER = "all_gather of the engine", "reduce_scatter of the engine"
"""The collectives that are timed: those that ZeRO uses."""
CPU_SIZES = ProbeSizes(DecoderShape(1, 512, 8, 64), 256, (1, 4), torch.float32, 15)
DEVICE_SIZES = ProbeSizes(DecoderShape(1, 4096, 32, 64), 4096, (1, 2), torch.bfloat16, 7)
"""What the block probe runs on processors and on other devices."""
_BUFFERS = (256 * 1024, 16 * 2**20)
_SUMMANDS = (64 * 1024, 2 * 2**20)
_TRIALS = 15


@dataclass(frozen=True)
class _LinkSpeed:
    link: float  # bytes per second and direction
    start: float  # seconds to start a collective
    shared_link: float = 0.0  # bytes per second that a rank reads from shared memory; 0: there is none
    shared_start: float = 0.0  # seconds to start a sum through it


def measure_device(sizes: ProbeSizes | None = None) -> Device:
    """Returns the device of this machine with the constants that its ranks reach while all of them work.

    Every rank of the process group must call it; all get the same result. The ranks share memory and, on processors,
    cores, so the result is valid for this number of ranks per node.

    Raises:
        DeepSpeedConfigError: The ranks are on several nodes.
    """
    ranks = comm.get_world_size()
    nearby = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if nearby != ranks:
        raise DeepSpeedConfigError(
            f"measure: {ranks} ranks, of which {nearby} are on this node; a file has the figures of one node. Measure "
            "on one node, and give the network between nodes with --network"
        )
    where = local_device()
    is_cpu = where.type == "cpu"
    known = None if is_cpu else device_of_product(torch.cuda.get_device_name(where))
    half_size = 0.0 if is_cpu else DeviceEfficiency().half_size
    sizes = sizes or (CPU_SIZES if is_cpu else DEVICE_SIZES)
    rates = _slowest(probe_block(sizes, where, half_size, comm.barrier), where)
    collectives = _probe_collectives(sizes.dtype) if ranks > 1 else None
    return _device(rates, collectives, known, where, ranks)


def _slowest(mine: BlockSpeed, where: torch.device) -> BlockSpeed:
    """Returns the rates of the slowest rank, for which the others wait."""
    kinds = list(mine.rates)
    values = torch.tensor(
        [-mine.rates[kind] for kind in kinds] + [mine.launch, mine.factor], dtype=torch.float64, device=where
    )
    comm.all_reduce(values, op=comm.ReduceOp.MAX)
    *rates, launch, factor = values.tolist()
    return BlockSpeed({kind: -rate for kind, rate in zip(kinds, rates, strict=True)}, launch, factor)


def _probe_collectives(dtype: torch.dtype) -> _LinkSpeed:
    """Times an all-gather and a reduce-scatter of a small and of a large buffer; on processors also sums.

    The shortest trial counts, because other programs only lengthen them. Where ranks share cores the median counts: in
    every trial some rank has to wait for a core, and the shortest one is luck.
    """
    ranks = comm.get_world_size()
    is_cpu = local_device().type == "cpu"
    shares_cores = is_cpu and ranks > len(os.sched_getaffinity(0))
    statistic = statistics.median if shares_cores else min
    small, large = (
        measure_collectives([GATHER, SCATTER], nbytes, dtype, trials=_TRIALS, statistic=statistic)
        for nbytes in _BUFFERS
    )

    def rate(pair: tuple[CollectiveSpeed, CollectiveSpeed]) -> float:
        one, other = pair
        share = (ranks - 1) / ranks
        more = other.seconds - one.seconds
        return (other.nbytes - one.nbytes) * share / more if more > 0 else other.nbytes * share / other.seconds

    link = statistics.harmonic_mean([rate(pair) for pair in zip(small, large, strict=True)])
    share = small[0].nbytes * (ranks - 1) / ranks / link
    found = _LinkSpeed(link, max(0.0, statistics.fmean(row.seconds for row in small) - share))
    if not is_cpu:
        return found
    seconds = measure_sums(_SUMMANDS, dtype, trials=_TRIALS, statistic=statistic)
    shared_link, shared_start = shared_speed(_SUMMANDS, seconds, ranks)
    return replace(found, shared_link=shared_link, shared_start=shared_start)


def shared_speed(sizes: Sequence[int], seconds: Sequence[float], ranks: int) -> tuple[float, float]:
    """Returns bytes per second that a rank reads from shared memory, and the seconds to start a sum through it.

    ``seconds`` are those of sums of a small and of a large summand; each rank reads the summands of the others.
    """
    read = [nbytes * (ranks - 1) for nbytes in sizes]
    more = seconds[1] - seconds[0]
    rate = (read[1] - read[0]) / more if more > 0 else read[1] / seconds[1]
    return rate, max(0.0, seconds[0] - read[0] / rate)


def _device(
    block: BlockSpeed, collectives: _LinkSpeed | None, known: Device | None, where: torch.device, ranks: int
) -> Device:
    matmul, attention = (block.rates[kind] for kind in (OperationKind.MATMUL, OperationKind.ATTENTION))
    bandwidth = block.rates[OperationKind.TRAFFIC]
    source = f"ds_plan --measure: {ranks} ranks on a node with {os.cpu_count()} cores, torch {torch.__version__}"
    if known is None:  # unknown device: the reached rate replaces the peak rate
        is_cpu = where.type == "cpu"
        base = Device(
            name="cpu" if is_cpu else "other",
            memory=_memory(where) // (ranks if is_cpu else 1),
            flops=matmul,
            memory_bandwidth=bandwidth,
            link=0.0,
            host_link=bandwidth if is_cpu else 0.0,
            source=source,
            cores=len(os.sched_getaffinity(0)) // torch.get_num_threads() if is_cpu else 0,
            efficiency=DeviceEfficiency(
                half_size=0.0 if is_cpu else DeviceEfficiency().half_size,
                contention=CONTENTION_OF_PROCESSORS if is_cpu else DeviceEfficiency().contention,
            ),
        )
    else:
        base = replace(known, memory=_memory(where), source=source)
    reached = replace(
        base.efficiency,
        matmul=matmul / base.flops,
        attention=attention / base.flops,
        bandwidth=bandwidth / base.memory_bandwidth,
        launch=block.launch,
        factor=block.factor,
    )
    if collectives is not None:
        link = base.link if known is not None else collectives.link
        reached = replace(
            reached,
            link=collectives.link / link,
            start=collectives.start,
            shared_link=collectives.shared_link,
            shared_start=collectives.shared_start,
        )
        base = replace(base, link=link)
    return replace(base, efficiency=reached)


def _memory(where: torch.device) -> int:
    if where.type != "cpu":
        return torch.cuda.get_device_properties(where).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
