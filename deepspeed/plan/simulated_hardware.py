"""Simulated hardware: a device without memory or streams, host memory and disk of which only sizes exist.

Every tensor of the size of the model is on torch's ``meta`` device: shapes, dtypes, storages and views are real,
values are not there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from typing_extensions import override

from deepspeed.accelerator.cpu import CPUAccelerator
from deepspeed.offload.file_io import BlockFile, IoSettings, Transfer
from deepspeed.offload.pinned import HostMemorySource
from deepspeed.offload.run_directory import Disk, RunDirectory
from deepspeed.plan.autocasting import SimulatedAutocast
from deepspeed.plan.memory import META
from deepspeed.plan.timeline.step_trace import (
    FINISHING_STREAM,
    FileWaitEvent,
    HostWaitEvent,
    StepRecording,
    StreamWaitEvent,
)
from deepspeed.zero.placement import Tier

Note = Callable[[torch.Tensor, Tier, bool], None]
"""Called for memory outside the device's allocator, with the tensor, its tier, and whether its pages are locked."""


class SimulatedStream(torch.Stream):
    """A stream of the simulated device, whose waits ``trace`` records."""

    def __new__(cls, trace: StepRecording, number: int) -> SimulatedStream:
        """Makes a stream that torch accepts as a device's."""
        return super().__new__(cls, stream_id=number, device_index=0, device_type=1)

    def __init__(self, trace: StepRecording, number: int) -> None:
        self._trace, self.number = trace, number

    @override
    def wait_event(self, event: Any) -> None:
        self._trace.add(StreamWaitEvent(event.record_number, self.number))

    @override
    def wait_stream(self, stream: Any) -> None:
        self._trace.add(StreamWaitEvent(self._trace.record_event(stream.number), self.number))

    @override
    def synchronize(self) -> None:
        self._trace.add(HostWaitEvent(self._trace.record_event(self.number)))


class SimulatedEvent:
    """An event of a simulated stream, recorded by ``trace``."""

    def __init__(self, trace: StepRecording) -> None:
        self._trace = trace
        self.record_number = -1  # number of the last record of it; -1 before it

    def record(self, stream: SimulatedStream | None = None) -> None:
        """Records the event on a stream; None: the one to which operations are issued."""
        self.record_number = self._trace.record_event(None if stream is None else stream.number)

    def query(self) -> bool:
        """Returns True: a simulated device is always done."""
        return True

    def synchronize(self) -> None:
        """Records that the host waits for the event."""
        self._trace.add(HostWaitEvent(self.record_number))


class SimulatedDevice(CPUAccelerator):
    """A device of a kind, with tensors on ``meta`` and streams whose waits are recorded."""

    def __init__(self, kind: str, trace: StepRecording) -> None:
        super().__init__()
        self._name = "meta"
        self._kind = kind
        self._trace = trace
        self._streams = itertools.count(FINISHING_STREAM + 1)
        self._communication_backend_name = "gloo" if kind == "cpu" else "nccl"
        # casts the arguments of operations under ``torch.autocast``, while it is active
        self.casting = SimulatedAutocast(kind)

    def device_name(self, index: Any = None) -> str:
        """Returns the device of the tensors."""
        return "meta"

    @property
    def computes_in_host_memory(self) -> bool:
        """Returns the value of the simulated kind of device."""
        return self._kind == "cpu"

    @override
    @property
    def autocast_dtype(self) -> torch.dtype:
        return self.casting.default_dtype

    @override
    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[Any]:
        return self.casting.region(dtype)

    @property
    def Stream(self) -> Any:
        """Makes a stream."""
        return lambda: SimulatedStream(self._trace, next(self._streams))

    @property
    def Event(self) -> Any:
        """Makes an event."""
        return lambda **_options: SimulatedEvent(self._trace)

    @override
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return self._trace.on_stream(stream.number)

    @override
    def current_stream(self, index: Any = None) -> Any:
        return SimulatedStream(self._trace, self._trace.stream)


class SimulatedHostMemory(HostMemorySource):
    """Host memory of which only the size exists; ``note`` gets each tensor, its tier, and whether it is pinned."""

    def __init__(self, *, is_device: bool, note: Note) -> None:
        self._is_device = is_device
        self._note = note

    @property
    def device(self) -> torch.device:
        """Device on which its tensors seem to be."""
        return META if self._is_device else torch.device("cpu")

    @override
    def pages(self, nbytes: int, *, pin: bool) -> torch.Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8, device=META)
        self._note(made, Tier.HOST, pin)
        return made

    @override
    def plain(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(numel, dtype=dtype, device=META)
        self._note(made, Tier.HOST, False)
        return made


class _SimulatedFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def remove(self) -> None:
        """Does nothing: there is nothing to remove."""


class _SimulatedTransfer(Transfer):
    """A read or write that takes no time; records when it is waited for."""

    def __init__(self, trace: StepRecording, number: int) -> None:
        super().__init__([])
        self._trace, self._number = trace, number

    @override
    def wait(self) -> None:
        self._trace.add(FileWaitEvent(self._number))


class _SimulatedFile:
    is_direct = True

    def __init__(self, disk: SimulatedDisk, path: Path) -> None:
        self._disk = disk
        self.path = path
        self.size = 0

    def grow(self, nbytes: int) -> int:
        """Adds ``nbytes`` (whole pages) of zeros, with the disk space for them."""
        start, self.size = self.size, self.size + nbytes
        self._disk.nbytes += nbytes
        return start

    def map(self, offset: int, nbytes: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(numel, dtype=dtype, device=META)
        self._disk.note(made, Tier.FILE, False)
        return made

    def read(self, buffer: torch.Tensor, offset: int) -> Transfer:
        self._disk.read += buffer.numel()
        return _SimulatedTransfer(self._disk.trace, self._disk.trace.start_file(buffer.numel(), is_read=True))

    def write(self, buffer: torch.Tensor, offset: int) -> Transfer:
        self._disk.written += buffer.numel()
        return _SimulatedTransfer(self._disk.trace, self._disk.trace.start_file(buffer.numel(), is_read=False))

    def close(self) -> None:
        """Does nothing: there is nothing to close."""


class SimulatedDisk(Disk):
    """A disk of unlimited size that stores nothing.

    Attributes:
        nbytes: Size of all files.
        read: Bytes read so far.
        written: Bytes written so far.
    """

    def __init__(self, note: Note, trace: StepRecording) -> None:
        self.note, self.trace = note, trace
        self.nbytes = self.read = self.written = 0

    @override
    def folder(self, parent: str, *, rank: int, purpose: str) -> RunDirectory:
        return cast(RunDirectory, _SimulatedFolder(Path(parent)))

    @override
    def file(self, path: Path, settings: IoSettings) -> BlockFile:
        return cast(BlockFile, _SimulatedFile(self, path))
