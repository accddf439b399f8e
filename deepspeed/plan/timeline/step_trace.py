"""Records what the engine issues in a step: operations, exchanges and waits for them, copies, and reads by the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deepspeed.plan.timeline.operation_cost import OperationCost

COMPUTE_STREAM = 0
"""Number of the stream on which the model computes; other streams have other numbers."""
FINISHING_STREAM = 1
"""Number of the stream on which a transport scales and adds what a reduction has brought."""


class OperationEvent(NamedTuple):
    """An operation on a stream of the device, or on the host where it updates offloaded states."""

    cost: OperationCost
    is_on_host: bool
    stream: int = COMPUTE_STREAM


class CollectiveEvent(NamedTuple):
    """The start of an exchange, behind everything that its stream was given before."""

    number: int
    name: str
    axis: str
    nbytes: int
    ranks: tuple[int, ...]
    stream: int = COMPUTE_STREAM


class WaitEvent(NamedTuple):
    """The point at which a stream waits for an exchange."""

    number: int
    stream: int = COMPUTE_STREAM


class StreamRecordEvent(NamedTuple):
    """The point at which a stream records event ``record``, for which other streams can wait."""

    record: int
    stream: int


class StreamWaitEvent(NamedTuple):
    """The point at which a stream waits for event ``record``: all work issued to the recording stream before it."""

    record: int
    stream: int


class CopyEvent(NamedTuple):
    """A copy between device and host on a stream of the device."""

    nbytes: int
    is_up: bool
    stream: int = COMPUTE_STREAM


class FileEvent(NamedTuple):
    """The start of a read or a write of a file of offloaded states, behind those of its direction."""

    number: int
    nbytes: int
    is_read: bool


class FileWaitEvent(NamedTuple):
    """The point at which the host waits for a read or a write of a file."""

    number: int


class HostWaitEvent(NamedTuple):
    """The point at which the host waits: for a value of the device, or for event ``record`` of a stream."""

    record: int = -1


class MarkEvent(NamedTuple):
    """The start of a part of the step."""

    phase: str  # forward, backward or step; of a pipeline, the kind of computation, step, or other
    micro_batch: int  # number of the micro-batch; -1: none
    chunk: int = -1  # number of the pipeline's chunk; -1: none


TraceEvent = (
    OperationEvent
    | CollectiveEvent
    | WaitEvent
    | StreamRecordEvent
    | StreamWaitEvent
    | CopyEvent
    | FileEvent
    | FileWaitEvent
    | HostWaitEvent
    | MarkEvent
)


@dataclass
class StepRecording:
    """Records the events of a rank's step."""

    # the recorded events, in the order in which the engine issued them
    events: list[TraceEvent] = field(default_factory=list)
    is_on: bool = False  # true while events are recorded
    stream: int = COMPUTE_STREAM  # number of the stream to which operations and exchanges are issued
    _count: int = 0

    @contextmanager
    def recording(self) -> Iterator[StepRecording]:
        """Clears the events and records while the context is open."""
        self.events.clear()
        self.is_on = True
        try:
            yield self
        finally:
            self.is_on = False

    def add(self, event: TraceEvent) -> None:
        """Records an event. Does nothing while recording is off."""
        if self.is_on:
            self.events.append(event)

    @contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Issues operations and exchanges to ``stream`` while the context is open."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def record_event(self, stream: int | None = None) -> int:
        """Records an event of a stream (None: that to which operations are issued) and returns its number."""
        self._count += 1
        self.add(StreamRecordEvent(self._count, self.stream if stream is None else stream))
        return self._count

    def start_file(self, nbytes: int, *, is_read: bool) -> int:
        """Records the start of a read or a write of a file and returns its number."""
        self._count += 1
        self.add(FileEvent(self._count, nbytes, is_read))
        return self._count

    def start(self, name: str, axis: str, nbytes: int, ranks: tuple[int, ...]) -> int:
        """Records the start of an exchange and returns its number."""
        self._count += 1
        self.add(CollectiveEvent(self._count, name, axis, nbytes, ranks, self.stream))
        return self._count


class TracedWork:
    """Wraps a transfer and calls ``record`` when it is waited for."""

    def __init__(self, work: Any, record: Callable[[], None]) -> None:
        self._work, self._record = work, record

    def wait(self) -> Any:
        """Records the wait, then waits for the transfer."""
        self._record()
        return self._work.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class TracedTransport:
    """Records the transfers of a transport, nested ones once; a mixin that stands before the transport's class."""

    trace: StepRecording  # records the transfers
    axis: str
    rank: int
    ranks: tuple[int, ...]
    _is_inside = False
    _number = -1  # number of the exchange that is being started

    def all_gather(self, flat: Any, **options: Any) -> Any:
        """Records and starts an all-gather."""
        return self._traced("all_gather", flat, functools.partial(self._plain.all_gather, flat, **options))

    def share(self, flat: Any, **options: Any) -> Any:
        """Records and starts the all-gather that ends an all-reduce."""
        return self._traced("all_gather", flat, functools.partial(self._plain.share, flat, **options))

    def reduce_scatter(self, flat: Any, out: Any, how: Any) -> Any:
        """Records and starts a reduce-scatter."""
        return self._traced("reduce_scatter", flat, functools.partial(self._plain.reduce_scatter, flat, out, how))

    def all_reduce(self, flat: Any, out: Any, how: Any) -> Any:
        """Records and starts an all-reduce."""
        return self._traced("all_reduce", flat, functools.partial(self._plain.all_reduce, flat, out, how))

    def sum_in_place(self, flat: Any, label: str) -> Any:
        """Records and starts an all-reduce if the transport has one call for it, as gloo has."""
        work = self._plain.sum_in_place(flat, label)
        return None if work is None else self._traced("all_reduce", flat, lambda: work)

    def swap(self, flat: Any, out: Any, **options: Any) -> Any:
        """Records and starts an all-to-all of equal slices."""
        return self._traced("all_to_all", flat, functools.partial(self._plain.swap, flat, out, **options))

    def all_to_all(self, source: Any, sent: Any, out: Any, received: Any, **options: Any) -> Any:
        """Records and starts an all-to-all of rows; recorded as a send if all rows go to one other rank."""
        call = functools.partial(self._plain.all_to_all, source, sent, out, received, **options)
        others = sum(1 for rank, numel in enumerate(sent) if numel and rank != self.rank)
        return self._traced("send" if others == 1 and len(sent) > 2 else "all_to_all", source, call)

    @property
    def _plain(self) -> Any:
        return super()

    def _traced(self, name: str, flat: Any, call: Callable[[], Any]) -> Any:
        if self._is_inside or not self.trace.is_on:
            return call()
        self._is_inside = True
        try:
            number = self._number = self.trace.start(name, self.axis, flat.numel() * flat.element_size(), self.ranks)
            return TracedWork(call(), lambda: self.trace.add(WaitEvent(number, self.trace.stream)))
        finally:
            self._is_inside = False
