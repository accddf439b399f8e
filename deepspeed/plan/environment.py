"""The environment of a simulation: one rank of a simulated job on a simulated machine.

There are no other ranks: transports move nothing and report every transfer as complete. The transports are the real
ones of ``deepspeed.comm``, with their chunks, limits, states and counters; only the process group below them is fake.
It "receives" this rank's own small values, as if all ranks ran the same program on the same data; large transfers leave
their buffers unchanged.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.axes import DATA
from deepspeed.comm.base.counters import traffic
from deepspeed.comm.base.recorder import log
from deepspeed.comm.job.connect import HostTransport
from deepspeed.comm.job.fake import FakeGroup, FakeJob
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.native import NativeTransport
from deepspeed.comm.transports.transport import LocalTransport, Transport
from deepspeed.errors import NotYetSupportedError
from deepspeed.logging import quiet
from deepspeed.offload.pinned import host_memory_from
from deepspeed.offload.run_directory import use_disk
from deepspeed.ops.flat import drop_scratch
from deepspeed.parallel.pipe.channel import StageChannels
from deepspeed.plan.autocasting import autocast_on_meta
from deepspeed.plan.memory import META
from deepspeed.plan.simulated_hardware import (
    SimulatedDevice,
    SimulatedDisk,
    SimulatedEvent,
    SimulatedHostMemory,
    SimulatedStream,
)
from deepspeed.plan.simulated_stage import SimulatedChannels, Stage
from deepspeed.plan.timeline.step_trace import (
    FINISHING_STREAM,
    HostWaitEvent,
    StepRecording,
    TracedTransport,
    WaitEvent,
)
from deepspeed.plan.values import OperationCount
from deepspeed.zero.update.speculation import IdleWorker, workers_from


class _FinishedWork:
    """A ``Work`` that is already complete: the network is assumed to be fast enough."""

    def wait(self, timeout: Any = None) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        return True


class _SimulatedReceive(_FinishedWork):
    """A receive that returns what this rank itself has sent under the same key."""

    def __init__(self, sent: dict[int, torch.Tensor], key: int, place: torch.Tensor) -> None:
        self._sent, self._key, self._place = sent, key, place

    def wait(self, timeout: Any = None) -> None:
        values = self._sent.get(self._key)
        if values is not None and values.numel() == self._place.numel():
            self._place.copy_(values)


@dataclass(frozen=True, eq=False)
class _PeerGroup(FakeGroup):
    _sent: dict[int, torch.Tensor] = field(default_factory=dict)

    def send(self, tensors: list[torch.Tensor], peer: int, key: int) -> _FinishedWork:
        """Keeps small values for :meth:`recv`."""
        if tensors[0].device.type == "cpu":
            self._sent[key] = tensors[0]
        return _FinishedWork()

    def recv(self, tensors: list[torch.Tensor], peer: int, key: int) -> _FinishedWork:
        """Returns a receive of this rank's own values."""
        return _SimulatedReceive(self._sent, key, tensors[0]) if tensors[0].device.type == "cpu" else _FinishedWork()


class _CollectiveGroup(FakeGroup):
    def _allgather_base(self, flat: torch.Tensor, mine: torch.Tensor) -> _FinishedWork:
        if flat.device.type == "cpu":
            flat.view(-1, mine.numel()).copy_(mine.view(1, -1).expand(flat.numel() // mine.numel(), -1))
        return _FinishedWork()

    def _reduce_scatter_base(self, out: torch.Tensor, flat: torch.Tensor) -> _FinishedWork:
        if flat.device.type == "cpu":
            out.copy_(flat[: out.numel()])
        return _FinishedWork()

    def alltoall_base(self, out: torch.Tensor, source: torch.Tensor, received: Any, sent: Any) -> _FinishedWork:
        return _FinishedWork()

    def allreduce(self, tensors: list[torch.Tensor]) -> _FinishedWork:
        return _FinishedWork()


def _as_gathered(rows: torch.Tensor, mine: int) -> torch.Tensor:
    """Returns the gathered rows; a sum that this rank leaves to another one is 1 there."""
    if rows.dtype == torch.float64 and rows[mine, 0] == 0:
        rows[:, 0] = 1.0
        rows[mine, 0] = 0.0
    return rows


class _SimulatedTransport(TracedTransport):
    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        self.trace.add(HostWaitEvent())
        return _as_gathered(self._plain.gather_small(tensor, channel=channel, label=label), self.rank)

    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> None:
        """Leaves the tensors as they are."""


class _SimulatedGlooTransport(_SimulatedTransport, HostTransport):
    """Gloo's transport, recorded."""


class _SimulatedNativeTransport(_SimulatedTransport, NativeTransport):
    @property
    @override
    def stream(self) -> SimulatedStream:
        return SimulatedStream(self.trace, self.trace.stream)

    @functools.cached_property
    @override
    def finishing_stream(self) -> int:
        return FINISHING_STREAM

    @override
    def queue_after(self, work: Any, finish: Callable[[], None]) -> SimulatedEvent:
        with self.trace.on_stream(self.finishing_stream):
            self.trace.add(WaitEvent(self._number, self.trace.stream))
            work.wait()
            finish()
            reached = SimulatedEvent(self.trace)
            reached.record()
            return reached

    def move(self, transfers: Any, *, label: str) -> None:
        """Leaves the tensors as they are."""


class _SimulatedOperations:
    """Collectives of ``torch.distributed`` that leave their tensors unchanged."""

    def all_reduce(self, tensor: torch.Tensor, **_options: Any) -> _FinishedWork:
        return _FinishedWork()

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, *_numels: Any, **_options: Any
    ) -> _FinishedWork:
        return _FinishedWork()

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor, **_options: Any) -> _FinishedWork:
        """Uses this rank's own values for those of all ranks."""
        output.view(-1, tensor.numel()).copy_(tensor.reshape(1, -1).expand(output.numel() // tensor.numel(), -1))
        return _FinishedWork()

    def broadcast(self, tensor: torch.Tensor, **_options: Any) -> _FinishedWork:
        return _FinishedWork()

    def __getattr__(self, name: str) -> Any:
        raise NotYetSupportedError(
            f"plan: {name} between ranks is not simulated; keep it out of the model, or plan on one device"
        )


class SimulatedJob(FakeJob):
    """Simulates rank ``rank`` of ``mesh.world_size`` without the others; ``trace`` records transfers."""

    def __init__(self, rank: int, mesh: Mesh, backend: str, trace: StepRecording | None = None) -> None:
        super().__init__(rank, mesh, backend, _SimulatedOperations())
        self._trace = trace if trace is not None else StepRecording()
        self.transports: list[Transport] = []  # all transports created so far

    @override
    def transport(self, device: torch.device | None, ranks: Sequence[int] | None = None, axis: str = DATA) -> Transport:
        members = range(self.size) if ranks is None else ranks
        if len(members) == 1:
            return LocalTransport()
        place = members.index(self.rank), len(members)
        made: _SimulatedGlooTransport | _SimulatedNativeTransport
        if self.ranks.backend_of() == "gloo":
            made = _SimulatedGlooTransport(_PeerGroup(tuple(members)), *place, axis)
        else:
            # Small exchanges need values, which only host tensors have in a simulation.
            made = _SimulatedNativeTransport(_CollectiveGroup(tuple(members)), *place, torch.device("cpu"), axis)
        made.ranks, made.trace = tuple(members), self._trace
        self.transports.append(made)
        return made


@dataclass(frozen=True)
class SimulatedPart:
    """One simulated rank, and the settings of its engine."""

    config: dict[str, Any]  # the configuration, with micro-batch and accumulation steps as numbers
    accumulation_steps: int  # micro-batches per step
    micro_batch: int  # samples per micro-batch and rank
    sequence_length: int  # tokens of a sample
    mesh: Mesh  # the ranks of the job along their axes
    rank: int  # the simulated rank
    kind: str  # kind of device: ``cpu``, or one with memory of its own
    autocast: bool = False  # forward runs under ``torch.autocast``
    stage: Stage | None = None  # the stage of the pipeline; None: there are no stages


@functools.cache
def _program_freezes() -> bool:
    """Whether the program had called ``gc.freeze`` when it first planned: Python counts frozen objects one by one."""
    return gc.get_freeze_count() > 0


@contextmanager
def simulated_environment(part: SimulatedPart) -> Iterator[tuple[OperationCount, SimulatedDisk, SimulatedJob]]:
    """Yields counters of operations, disk and ranks, with device, memory, disk and process groups replaced."""
    count = OperationCount(part.kind)
    disk = SimulatedDisk(count.note, count.trace)
    accelerator = get_accelerator()
    device = SimulatedDevice(part.kind, count.trace)
    world = SimulatedJob(part.rank, part.mesh, device.communication_backend_name() or "nccl", count.trace)
    host = SimulatedHostMemory(is_device=part.kind == "cpu", note=count.note)
    collects = gc.isenabled()
    counts = copy.deepcopy((traffic.requested_along, traffic.ran_along))
    local_rank = os.environ.pop("LOCAL_RANK", None)
    is_logging, log.enabled = log.enabled, False  # it holds what ranks exchange, and asks torch about their groups
    # Objects from before need not be scanned when the engine's garbage is collected at the end.
    freezes = not _program_freezes()
    if freezes:
        gc.freeze()
    set_accelerator(device)
    drop_scratch(META)
    try:
        with ExitStack() as stack:
            for context in (
                quiet(),
                autocast_on_meta(),
                world.as_current(),
                host_memory_from(host),
                use_disk(disk),
                workers_from(IdleWorker),
                count.counting(),
            ):
                stack.enter_context(context)
            if part.stage is not None:
                world.substitutes[StageChannels] = lambda _job, _mesh, _device, stage=part.stage: SimulatedChannels(
                    stage, packs=part.kind == "cpu"
                )
            if part.autocast:
                stack.enter_context(device.casting.active())
            yield count, disk, world
    finally:
        drop_scratch(META)
        set_accelerator(accelerator)
        traffic.requested_along, traffic.ran_along = counts
        log.enabled = is_logging
        if local_rank is not None:
            os.environ["LOCAL_RANK"] = local_rank
        if collects:
            gc.enable()
        if freezes:
            gc.unfreeze()
