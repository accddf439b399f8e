"""What surrounds a simulation: a rank of a job that does not exist, on a machine that does not exist."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.counters import traffic
from deepspeed.logging import quiet
from deepspeed.offload.disk import disk_is
from deepspeed.offload.pinned import host_memory_from
from deepspeed.ops.chunks import drop_scratch
from deepspeed.parallel.pipe.transports import StageTransports
from deepspeed.plan.autocasting import asked_for_meta
from deepspeed.plan.memory import META
from deepspeed.plan.network import SimulatedJob
from deepspeed.plan.simulated_hardware import SimulatedDevice, SimulatedDisk, SimulatedHostMemory
from deepspeed.plan.simulated_stage import Stage, simulated_transports
from deepspeed.plan.values import OperationCount
from deepspeed.zero.update.speculation import IdleWorker, workers_from


@dataclass(frozen=True)
class SimulatedPart:
    """One rank that is simulated, and what its engine is given.

    Attributes:
        config: The configuration, with micro-batch and accumulation steps in numbers.
        accumulation_steps: Micro-batches per step.
        micro_batch: Samples per micro-batch and rank.
        sequence_length: Tokens of a sample.
        mesh: The ranks of the job along their axes.
        rank: The simulated one.
        kind: Kind of device: ``cpu``, or one with memory of its own.
        autocast: Forward runs under ``torch.autocast``.
        stage: Of the pipeline; None: there are no stages.
    """

    config: dict[str, Any]
    accumulation_steps: int
    micro_batch: int
    sequence_length: int
    mesh: Mesh
    rank: int
    kind: str
    autocast: bool = False
    stage: Stage | None = None


@contextmanager
def simulated_environment(part: SimulatedPart) -> Iterator[tuple[OperationCount, SimulatedDisk, SimulatedJob]]:
    """Everything that the engine must not notice; undone at the end. Gives what counts: operations, disk, ranks."""
    count = OperationCount(part.kind)
    disk = SimulatedDisk(count.note)
    accelerator = get_accelerator()
    device = SimulatedDevice(part.kind)
    world = SimulatedJob(part.rank, part.mesh, device.communication_backend_name() or "nccl", count.trace)
    host = SimulatedHostMemory(is_device=part.kind == "cpu", note=count.note)
    collects = gc.isenabled()
    books = copy.deepcopy((traffic.asked_along, traffic.ran_along))
    local_rank = os.environ.pop("LOCAL_RANK", None)
    # What was there before need not be looked through when the engine has its garbage collected at the end.
    freezes = gc.get_freeze_count() == 0
    if freezes:
        gc.freeze()
    set_accelerator(device)
    drop_scratch(META)
    try:
        with ExitStack() as stack:
            for context in (
                quiet(),
                asked_for_meta(),
                world.as_current(),
                host_memory_from(host),
                disk_is(disk),
                workers_from(IdleWorker),
                count.counting(),
            ):
                stack.enter_context(context)
            if part.stage is not None:
                world.substitutes[StageTransports] = simulated_transports(part.stage, packs=part.kind == "cpu")
            if part.autocast:
                stack.enter_context(device.casting.active())
            yield count, disk, world
    finally:
        drop_scratch(META)
        set_accelerator(accelerator)
        traffic.asked_along, traffic.ran_along = books
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank
        if collects:
            gc.enable()
        if freezes:
            gc.unfreeze()
