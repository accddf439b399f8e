"""The simulated device as one context: everything that the package must not notice, undone at the end."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.checkpoint import disk as checkpoint_disk
from deepspeed.comm.transports import native
from deepspeed.offload.file_io import BlockFile, IoSettings, Transfer
from deepspeed.offload.pinned import HostMemorySource, host_memory_from
from deepspeed.offload.run_directory import Disk, use_disk
from deepspeed.zero.update.speculation import InlineWorker, workers_from
from tests.harness.device.accelerator import SimulatedAccelerator
from tests.harness.device.allocator import PinnedAllocator
from tests.harness.device.clocks import Actor, Clocks
from tests.harness.device.collectives import MirrorJob
from tests.harness.device.memory import Memory
from tests.harness.device.operations import Operations
from tests.harness.device.peers import connected
from tests.harness.device.places import Place
from tests.harness.device.surface import tensors_report_their_device


class OrderError(AssertionError):
    """Work that is not ordered; the message has a sentence for each pair of places."""


class Device:
    """What a test can ask of the simulated device.

    Attributes:
        accelerator: As ``get_accelerator()`` returns it.
        clocks: Streams, and the counts of launches and waits.
    """

    def __init__(self, memory: Memory, accelerator: SimulatedAccelerator, world: MirrorJob | None) -> None:
        self._memory = memory
        self.accelerator = accelerator
        self.clocks = memory.clocks
        self._world = world

    @property
    def world(self) -> MirrorJob:
        """Returns the job whose other ranks mirror this one."""
        assert self._world is not None, "the other ranks are processes"
        return self._world

    @property
    def pinned(self) -> PinnedAllocator:
        """Returns torch's allocator of page-locked memory."""
        return self._memory.pinned

    @property
    def most_registered(self) -> int:
        """Returns the peak of the bytes that the package had registered with the driver."""
        return self._memory.most_registered

    def forget_most_registered(self) -> None:
        """Resets that peak to the bytes that are registered now."""
        self._memory.most_registered = self._memory.registered

    @property
    def findings(self) -> list[str]:
        """Returns the findings so far."""
        return self._memory.findings


@contextmanager
def simulated_rank() -> Iterator[Device]:
    """As :func:`simulated_device`, in a rank of ``run_ranks(..., backend=None)``: the other ranks are the others there.

    Raises:
        OrderError: Some work of this rank was not ordered.
    """
    with _simulated(Clocks(), None) as device:
        yield device


@contextmanager
def simulated_device(*, ranks: int = 1, rank: int = 0, quick: bool = False) -> Iterator[Device]:
    """Inside, the process has an accelerator called ``cuda`` and perhaps peers; at the end unordered work is an error.

    Args:
        ranks: Ranks that the package finds; more than one are mirrors of this one.
        rank: This one.
        quick: An event without a wait is reported as reached at a query, instead of as pending.

    Raises:
        OrderError: Some work was not ordered.
    """
    clocks = Clocks(device_is_quick=quick)
    with _simulated(clocks, MirrorJob(clocks, rank, ranks)) as device:
        yield device


@contextmanager
def _simulated(clocks: Clocks, world: MirrorJob | None) -> Iterator[Device]:
    memory = Memory(clocks)
    operations = Operations(clocks, memory)
    accelerator = SimulatedAccelerator(clocks, memory)
    before = get_accelerator()
    set_accelerator(accelerator)
    try:
        with ExitStack() as stack:
            stack.enter_context(tensors_report_their_device(operations, memory))
            stack.enter_context(host_memory_from(_Pages(memory)))
            stack.enter_context(use_disk(_RecordedDisk(operations, memory)))
            stack.enter_context(workers_from(InlineWorker))
            stack.enter_context(_bytes_are_read(operations, memory))
            stack.enter_context(mock.patch.object(native, "pause", clocks.nap))
            if world is not None:
                stack.enter_context(world.as_current())
            stack.enter_context(operations)
            if world is None:
                stack.enter_context(connected(clocks, operations))
            yield Device(memory, accelerator, world)
    finally:
        clocks.close()
        set_accelerator(before)
    if memory.findings:
        raise OrderError(f"{len(memory.findings)} orderings are missing:\n" + "\n".join(memory.findings))


class _Pages(HostMemorySource):
    """Host memory of offloaded states; locked pages are those that nobody but the package looks after."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def pages(self, nbytes: int, *, pin: bool) -> torch.Tensor:
        made = super().pages(nbytes, pin=False)
        if pin:
            with torch._C.DisableTorchFunction():
                self._memory.register(made.untyped_storage())
        return made


class _RecordedTransfer(Transfer):
    def __init__(self, real: Transfer, memory: Memory, actor: Actor, time: int, buffer: torch.Tensor) -> None:
        self._real = real
        self._memory = memory
        self._actor = actor
        self._time = time
        self._buffer = buffer

    def wait(self) -> None:
        self._real.wait()
        self._memory.clocks.host.learn({self._actor: self._time})


class _RecordedFile(BlockFile):
    """A file whose transfers are separate work: the host starts them, and they are over after its wait."""

    operations: Operations
    memory: Memory

    def read(self, buffer: torch.Tensor, offset: int) -> Transfer:
        return self._recorded(super().read(buffer, offset), buffer, "file read", writes=True)

    def write(self, buffer: torch.Tensor, offset: int) -> Transfer:
        return self._recorded(super().write(buffer, offset), buffer, "file write", writes=False)

    def _recorded(self, real: Transfer, buffer: torch.Tensor, what: str, *, writes: bool) -> Transfer:
        with torch._C.DisableTorchFunction():
            block = self.memory.know(buffer.untyped_storage(), on_device=False)
        if block.disk is None:
            block.disk = Actor("the disk")
        block.disk.follow(self.memory.clocks.host)
        self.operations.touch(buffer, block.disk, Place(what), writes=writes)
        return _RecordedTransfer(real, self.memory, block.disk, block.disk.time, buffer)


class _RecordedDisk(Disk):
    def __init__(self, operations: Operations, memory: Memory) -> None:
        self._operations = operations
        self._memory = memory

    def file(self, path: Path, settings: IoSettings) -> BlockFile:
        made = _RecordedFile(path, settings)
        made.operations, made.memory = self._operations, self._memory
        return made


@contextmanager
def _bytes_are_read(operations: Operations, memory: Memory) -> Iterator[None]:
    """Records reads of host memory by address, as checkpoints do."""
    real = checkpoint_disk.bytes_of

    def bytes_of(tensor: torch.Tensor) -> Any:
        operations.touch(tensor, memory.clocks.host, Place("bytes_of"), writes=False)
        return real(tensor)

    with mock.patch.object(checkpoint_disk, "bytes_of", bytes_of):
        yield
