"""``python -m on_gpu.simulated_ranks_program WHO SHAPE RATE``: one of eight ranks; times, memory, waits, launches."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from contest.contestants import fully_sharded
from torch.profiler import ProfilerActivity, profile

from deepspeed.axes import DATA
from deepspeed.comm.job.mesh import Mesh
from deepspeed.plan.environment import SimulatedJob
from on_gpu.models import SHAPES, Shape, Step, engine_step, torch_step, zero_of
from on_gpu.part import timed, waiter
from on_gpu.queue import QueuedGroup, QueuedTransport
from on_gpu.speed_program import host_waits

RANKS = 8
SLEEP = "spin_kernel"  # the kernel of torch.cuda._sleep, which stands for a transfer


class QueuedJob(SimulatedJob):
    """Rank 0 of eight. All transfers share one stream, as NCCL's communicators share the links.

    Args:
        device: Device of the buffers.
        rate: Bytes per second.
    """

    def __init__(self, device: torch.device, rate: float) -> None:
        super().__init__(0, Mesh(((DATA, RANKS),)), "nccl")
        self._simulated_on = device
        self._group = QueuedGroup(torch.cuda.Stream() if device.type == "cuda" else None, rate)

    def transport(self, device: torch.device | None, ranks: Sequence[int] | None = None, axis: str = DATA) -> Any:
        """Returns the transport for NCCL over the queued group."""
        members = tuple(range(RANKS) if ranks is None else ranks)
        if len(members) == 1:
            return super().transport(device, ranks, axis)
        made = QueuedTransport(self._group, members.index(self.rank), len(members), self._simulated_on, axis)
        made.ranks = members
        return made


def main(who: str, name: str, rate: str) -> None:
    """Measures, and prints the JSON."""
    shape, device = SHAPES[name], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if who == "fsdp2":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.distributed.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
        step = torch_step(fully_sharded(shape.build(device.type), device.type, RANKS), autocast=False)
        found = _measured(step, shape, device)
    else:
        with QueuedJob(device, float(rate)).as_current():
            step, engine = engine_step(shape.build(device.type, torch.bfloat16), shape, zero_of(who))
            found = _measured(step, shape, device)
            engine.destroy()
    sys.stdout.write(json.dumps(found) + "\n")


def _measured(step: Step, shape: Shape, device: torch.device) -> dict[str, Any]:
    batch = shape.batch(device.type)
    is_small = shape is SHAPES["tiny"]
    for _ in range(2):
        step(batch)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(lambda: step(batch), warmup=1, steps=3 if is_small else 8, wait=waiter(device.type))
    found: dict[str, Any] = {"ms": 1e3 * seconds, "peak": None, "transfers": None, "hidden": None}
    if not bool(step(batch).isfinite()):  # then updates are skipped, so time and memory would be too small
        raise RuntimeError("the loss is not finite")
    if not on_gpu:
        return {**found, "waits": None, "launches": None}
    found["peak"] = torch.cuda.max_memory_allocated() / 1e9
    found["waits"] = host_waits(lambda: step(batch))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step(batch)
        torch.cuda.synchronize()
    kernels = [e for e in recorded.events() if str(e.device_type)[-4:] == "CUDA"]
    queues = {e.device_resource_id for e in kernels if SLEEP in e.name}  # streams of transfers
    spans = [(e.device_resource_id in queues, (e.time_range.start, e.time_range.end)) for e in kernels]
    total, hidden = overlap([span for moves, span in spans if moves], [span for moves, span in spans if not moves])
    found["launches"] = sum(e.name.startswith("cudaLaunchKernel") for e in recorded.events())
    return {**found, "transfers": total / 1e3, "hidden": hidden / total if total else None}


def overlap(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> tuple[float, float]:
    """Returns the length of the union of the first intervals, and how much of it the second ones cover."""
    ours, theirs = _union(first), _union(second)
    covered = 0.0
    index = 0
    for start, end in ours:
        while index < len(theirs) and theirs[index][1] <= start:
            index += 1
        at = index
        while at < len(theirs) and theirs[at][0] < end:
            covered += min(end, theirs[at][1]) - max(start, theirs[at][0])
            at += 1
    return sum(end - start for start, end in ours), covered


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


if __name__ == "__main__":
    main(*sys.argv[1:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
