"""Computes the times of the events of a recorded step.

The host issues events in order, each of which takes a little time. An operation starts when it is issued and its stream
is free; an exchange when it is issued, earlier work of its stream is done, and its communicator, and for ranks on
several nodes the network, are free. A wait blocks its stream until the exchange or the event is over. There is no other
ordering, so transfers overlap exactly where the program allows it.

Operations and exchanges on other streams slow computation that runs at the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deepspeed.axes import EXPERT, SEQUENCE, TENSOR
from deepspeed.plan.prediction.device_model import DeviceModel
from deepspeed.plan.prediction.network_model import NetworkModel, RankGroup
from deepspeed.plan.timeline.operation_cost import OperationCost, OperationKind
from deepspeed.plan.timeline.step_trace import (
    COMPUTE_STREAM,
    CollectiveEvent,
    CopyEvent,
    FileEvent,
    FileWaitEvent,
    HostWaitEvent,
    MarkEvent,
    OperationEvent,
    StreamRecordEvent,
    StreamWaitEvent,
    TraceEvent,
    WaitEvent,
)

COMPUTE, HOST, COPY_UP, COPY_DOWN = "compute", "host", "copies to the device", "copies to the host"
FILE_READ, FILE_WRITE = "reads of files", "writes of files"
_COPIES = "copies"  # in place of an axis
_READ = 10e-6  # seconds from the device's end of work until the host continues


class StreamSpan(NamedTuple):
    """Something that a stream does, with start and end."""

    stream: str
    name: str
    start: float
    end: float


class SpanFlow(NamedTuple):
    """A dependency between two spans: the second one starts after the first one has ended."""

    name: str  # the name of the dependency
    source: StreamSpan  # the first span
    target: StreamSpan  # the second span
    source_rank: str = ""  # name of the rank of the first span; empty: there is one rank
    target_rank: str = ""  # name of the rank of the second span


class _ReplayedTransfer(NamedTuple):
    """An exchange, or work of a side stream, with its times.

    The axis of an operation is empty, that of a copy between device and host ``_COPIES``.
    """

    axis: str
    begin: float
    end: float


@dataclass
class _SideStream:
    """A side stream: any stream other than that of computation."""

    free: float = 0.0  # when all its work is done
    copies: float = 0.0  # when its last copy between device and host is done
    # by number, the exchanges that it waited for, and by numbers below 0 its operations and copies
    transfers: dict[int, _ReplayedTransfer] = field(default_factory=dict)


@dataclass
class ReplayTimes:
    """Divides the time of recorded events by cause, in seconds."""

    # computation by kind of kernel, that of updates left out
    work: dict[OperationKind, float] = field(default_factory=lambda: defaultdict(float))
    # by axis, waits for exchanges, and the slowdown of computation beside them
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    host: float = 0.0  # time in which the device was idle because the host had issued nothing or was reading a value
    copies: float = 0.0  # waits for copies between device and host
    files: float = 0.0  # waits for reads and writes of files
    update: float = 0.0  # computation of updates
    seconds: float = 0.0  # until everything is over
    spans: list[StreamSpan] = field(default_factory=list)
    # dependencies of exchanges and copies on their inputs, and of waits on them
    flows: list[SpanFlow] = field(default_factory=list)
    marks: list[tuple[MarkEvent, float]] = field(default_factory=list)  # when parts of the step began


class ReplayRunner:
    """Replays events; ``is_asynchronous``: the device runs beside the host, as it does not on CPUs."""

    def __init__(self, device: DeviceModel, network: NetworkModel, *, is_asynchronous: bool = True) -> None:
        self._device, self._network = device, network
        self._is_asynchronous = is_asynchronous
        self._launch = device.device.efficiency.launch
        self._known: dict[OperationCost, float] = {}
        self._handlers = {
            OperationEvent: self._operate,
            CollectiveEvent: self._exchange,
            WaitEvent: self._wait,
            StreamRecordEvent: self._record,
            StreamWaitEvent: self._wait_for_stream,
            CopyEvent: self._copy,
            FileEvent: self._start_file,
            FileWaitEvent: self._wait_for_file,
            HostWaitEvent: self._read,
            MarkEvent: self._mark,
        }

    def run(self, events: Iterable[TraceEvent]) -> ReplayTimes:
        """Replays events from a common start."""
        self._found = ReplayTimes()
        self._compute = self._host = self._wire = self._up = self._down = 0.0
        self._free: dict[str, float] = defaultdict(float)  # by communicator
        self._link_free = {True: 0.0, False: 0.0}  # of copies beside computation, up and down
        self._disk_free = {True: 0.0, False: 0.0}  # for reads and for writes
        self._disk_busy = {True: 0.0, False: 0.0}
        self._files: dict[int, float] = {}  # by number of a read or write, its end
        self._works: dict[int, _ReplayedTransfer] = {}  # those that were not waited for
        self._beside: dict[int, _SideStream] = defaultdict(_SideStream)
        self._records: dict[int, _SideStream] = {}  # as the stream was at the event
        self._charged: set[int] = set()  # transfers whose cost has been charged to computation
        self._operations = 0  # on other streams
        self._phase = ""
        self._last: dict[str, StreamSpan] = {}  # by stream, its last span, or the last that it waits for
        self._recorded: dict[int, StreamSpan | None] = {}  # by event, the last span of its stream before it
        self._spans_of: dict[int, StreamSpan] = {}  # by number of a transfer that nothing waited for
        self._file_spans: dict[int, StreamSpan] = {}
        # By stream, what its next operation waits for; the device waits for what the host has waited for.
        self._sources: dict[str, list[StreamSpan]] = {COMPUTE: [], HOST: []}
        # Updates on the host, and its waits for copies and for files, since the device computed.
        self._updated = self._copied = self._filed = 0.0
        for event in events:
            self._handlers[type(event)](event)  # type: ignore[operator]
        own = max(self._compute, self._host)
        self._idle_until(own)
        ends = [work.end for work in self._works.values()]
        ends += [stream.free for stream in self._beside.values() if stream.free > stream.copies]
        copies = [stream.copies for stream in self._beside.values()]
        last = max([own, self._down, *ends, *copies])
        # Unfinished writes overlap with the next step, which starts with an equally busy disk.
        self._found.files += max(0.0, max(self._disk_busy.values()) - last)
        last = max(last, *self._disk_busy.values())
        waits = max(0.0, max(ends, default=0.0) - own)
        self._found.exposed["data"] += waits
        self._found.copies += max(0.0, max(copies, default=0.0) - own - waits)
        self._found.seconds = last
        return self._found

    def _operate(self, event: OperationEvent) -> None:
        cost = event.cost
        if event.is_on_host:
            seconds = cost.nbytes / self._network.machine.host_bandwidth
            begin = max(self._host, self._down)
            self._copied += max(0.0, begin - max(self._host, self._compute))
            self._host = begin + seconds
            self._updated += seconds
            self._end_flows(self._add_span(HOST, cost.name, begin, self._host))
            return
        if cost not in self._known:
            self._known[cost] = cost.seconds(self._device, fp8=self._network.machine.multiplies_in_fp8)
        seconds = self._known[cost]
        self._host += self._launch
        if event.stream != COMPUTE_STREAM:
            stream = self._beside[event.stream]
            begin = max(stream.free, self._host)
            stream.free = begin + seconds
            span = self._add_span(_name_of(event.stream), cost.name, begin, stream.free)
            if seconds > 0:
                self._operations += 1
                stream.transfers[-self._operations] = _ReplayedTransfer("", begin, stream.free)
                self._spans_of[-self._operations] = span
            return
        begin = max(self._compute, self._host)
        self._idle_until(begin)
        self._compute = begin + seconds
        if not self._is_asynchronous:
            self._host = self._compute
        if self._phase == "step":
            self._found.update += seconds
        else:
            self._found.work[cost.kind] += seconds
        self._end_flows(self._add_span(COMPUTE, cost.name, begin, self._compute))

    def _idle_until(self, begin: float) -> None:
        """Delays the compute stream until ``until``, and attributes the delay to the host's work in that time."""
        gap = begin - self._compute
        updated, self._updated = min(self._updated, gap), 0.0
        copied, self._copied = min(self._copied, gap - updated), 0.0
        filed = min(self._filed, gap - updated - copied)
        self._filed -= filed
        rest = gap - copied - updated - filed
        self._found.copies += copied
        self._found.update += updated
        self._found.files += filed
        self._found.host += rest
        end = self._compute
        for name, seconds in (("copies", copied), ("files", filed), ("update on the host", updated), ("host", rest)):
            self._draw(COMPUTE, f"waits: {name}", end, end + seconds)
            end += seconds
        self._compute = begin

    def _exchange(self, event: CollectiveEvent) -> None:
        ranks = event.ranks
        group = RankGroup(len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1)
        is_of_layers = event.axis in (TENSOR, SEQUENCE, EXPERT)
        if event.name == "all_reduce":
            find = self._network.sum_of_activations if is_of_layers else self._network.all_reduce
            seconds = find(event.nbytes, group)
        elif event.name == "all_to_all":
            find = self._network.exchange_of_activations if is_of_layers else self._network.all_to_all
            seconds = find(event.nbytes, group)
        elif event.name == "send":  # a step of a ring, as slow as its slowest hop: that between nodes, if any
            is_far = self._network.spread(group)[0] > 1
            seconds = self._network.send(event.nbytes, self._network.machine.link_domain if is_far else group.stride)
        else:
            seconds = self._network.gather(event.nbytes, group)
        self._host += self._launch
        before = self._compute if event.stream == COMPUTE_STREAM else self._beside[event.stream].free
        begin = max(self._free[event.axis], before, self._host)
        if self._network.spread(group)[0] > 1:
            begin = max(begin, self._wire)
            self._wire = begin + seconds
        self._free[event.axis] = begin + seconds
        self._works[event.number] = _ReplayedTransfer(event.axis, begin, begin + seconds)
        span = self._add_span(event.axis, f"{event.name} of {event.nbytes:,} B", begin, begin + seconds)
        self._start_flow(event.stream, span)
        self._spans_of[event.number] = span

    def _wait(self, event: WaitEvent) -> None:
        work = self._works.pop(event.number, None)
        if work is None:
            return  # waited for before, or started before the recording
        if event.stream != COMPUTE_STREAM:
            stream = self._beside[event.stream]
            stream.free = max(stream.free, work.end)
            stream.transfers[event.number] = work
            self._let_wait(event.stream, self._spans_of.get(event.number))
            return
        self._hold_up({event.number: work}, work.end)

    def _record(self, event: StreamRecordEvent) -> None:
        self._recorded[event.record] = self._last.get(_name_of(event.stream))
        if event.stream == COMPUTE_STREAM:
            self._records[event.record] = _SideStream(self._compute)
        else:
            stream = self._beside[event.stream]
            unpaid = {number: work for number, work in stream.transfers.items() if number not in self._charged}
            stream.transfers = dict(unpaid)
            self._records[event.record] = _SideStream(stream.free, transfers=unpaid)

    def _wait_for_stream(self, event: StreamWaitEvent) -> None:
        other = self._records.get(event.record)
        if other is None:
            return  # recorded before the recording of the step began
        if event.stream == COMPUTE_STREAM:
            self._hold_up(other.transfers, other.free)
            return
        stream = self._beside[event.stream]
        stream.free = max(stream.free, other.free)
        stream.transfers |= other.transfers
        self._let_wait(event.stream, self._recorded.get(event.record))

    def _hold_up(self, transfers: Mapping[int, _ReplayedTransfer], until: float) -> None:
        """Delays the compute stream until ``until``, and attributes the delay to the given transfers, by axis."""
        if until > self._compute:  # nothing waits before the host has issued the wait
            self._idle_until(max(self._compute, min(self._host, until)))
        start = self._compute
        new = [work for number, work in transfers.items() if number not in self._charged]
        self._charged.update(transfers)
        self._wait_for_transfers(COMPUTE, transfers)
        unexplained, taken = max(0.0, until - start), 0.0
        for axis, begin, end in new:
            waits = max(0.0, min(end, until) - max(start, begin))
            unexplained -= waits
            if axis == _COPIES:  # copies use no cores, and little of the memory's bandwidth
                self._found.copies += waits
                continue
            slowed = self._network.slowdown(end - begin, waits)
            self._add_wait(axis, waits + slowed)
            taken += slowed
        last = next((work.axis for work in reversed(new) if work.axis), "")
        if unexplained > 0:  # it began after the wait
            self._add_wait(last, unexplained)
        if until > start:
            name = last or "another stream"
            self._draw(COMPUTE, f"waits: {name}", self._compute, until)
        self._compute = max(self._compute, until) + taken
        self._draw(COMPUTE, f"slowed: {last}", self._compute - taken, self._compute)

    def _draw(self, stream: str, name: str, begin: float, end: float) -> None:
        if end > begin:
            self._found.spans.append(StreamSpan(stream, name, begin, end))

    def _add_span(self, stream: str, name: str, begin: float, end: float) -> StreamSpan:
        """Adds a span and returns it. Spans without a duration are never the source of a dependency."""
        span = StreamSpan(stream, name, begin, end)
        self._found.spans.append(span)
        if end > begin:
            self._last[stream] = span
        return span

    def _start_flow(self, stream: int, target: StreamSpan) -> None:
        source = self._last.get(_name_of(stream))
        if source is not None:
            self._found.flows.append(SpanFlow("starts", source, target))

    def _end_flows(self, target: StreamSpan) -> None:
        if target.end <= target.start:
            return
        for stream in (HOST, COMPUTE) if target.stream == COMPUTE else (HOST,):
            self._found.flows += [SpanFlow("waited for", source, target) for source in self._sources[stream]]
            self._sources[stream].clear()

    def _wait_for_transfers(self, stream: str, numbers: Iterable[int]) -> None:
        found = (self._spans_of.pop(number, None) for number in numbers)
        self._sources[stream] += [span for span in found if span is not None]

    def _let_wait(self, stream: int, source: StreamSpan | None) -> None:
        """Makes a stream's next operation depend on ``source``, if that ends after the stream's previous work."""
        before = self._last.get(_name_of(stream))
        if source is not None and (before is None or source.end > before.end):
            self._last[_name_of(stream)] = source

    def _add_wait(self, axis: str, seconds: float) -> None:
        if axis == _COPIES:
            self._found.copies += seconds
        elif axis:
            self._found.exposed[axis] += seconds
        else:
            self._found.work[OperationKind.TRAFFIC] += seconds

    def _copy(self, event: CopyEvent) -> None:
        rate = self._device.device.host_link
        seconds = event.nbytes / rate if rate > 0 else 0.0
        if event.stream != COMPUTE_STREAM:
            self._copy_beside(event, seconds)
        elif event.is_up:
            self._idle_until(max(self._compute, self._host))
            begin = max(self._up, self._compute)
            self._up = begin + seconds
            self._found.copies += max(0.0, self._up - self._compute)
            self._draw(COMPUTE, "waits: copies", self._compute, self._up)
            self._compute = max(self._compute, self._up)
            self._sources[COMPUTE].append(self._add_span(COPY_UP, "copy", begin, self._up))
        else:
            begin = max(self._down, self._compute)
            self._down = begin + seconds
            self._start_flow(event.stream, self._add_span(COPY_DOWN, "copy", begin, self._down))

    def _copy_beside(self, event: CopyEvent, seconds: float) -> None:
        """Runs a copy on a side stream: after earlier work of the stream, and earlier copies on the link."""
        stream = self._beside[event.stream]
        self._host += self._launch
        begin = max(stream.free, self._host, self._link_free[event.is_up])
        stream.free = stream.copies = self._link_free[event.is_up] = begin + seconds
        span = self._add_span(COPY_UP if event.is_up else COPY_DOWN, "copy", begin, stream.free)
        self._start_flow(event.stream, span)
        if seconds > 0:
            self._operations += 1
            stream.transfers[-self._operations] = _ReplayedTransfer(_COPIES, begin, stream.free)
            self._spans_of[-self._operations] = span

    def _start_file(self, event: FileEvent) -> None:
        """Starts a read or a write. Each direction has the disk's rate, which the ranks of a node share."""
        machine = self._network.machine
        seconds = event.nbytes * machine.devices_per_node / machine.disk
        self._disk_busy[event.is_read] += seconds
        begin = max(self._host, self._disk_free[event.is_read])
        end = self._disk_free[event.is_read] = self._files[event.number] = begin + seconds
        span = self._add_span(FILE_READ if event.is_read else FILE_WRITE, "file", begin, end)
        self._file_spans[event.number] = span

    def _wait_for_file(self, event: FileWaitEvent) -> None:
        until = self._files.pop(event.number, 0.0)  # 0: waited for before, or started before the recording
        self._filed += max(0.0, until - max(self._host, self._compute))
        self._host = max(self._host, until)
        if until > 0:
            self._sources[HOST].append(self._file_spans.pop(event.number))

    def _read(self, event: HostWaitEvent) -> None:
        if event.record < 0:
            until = self._compute
        elif event.record in self._records:
            until = self._records[event.record].free
            self._copied += max(0.0, until - max(self._host, self._compute))
            self._wait_for_transfers(HOST, self._records[event.record].transfers)
        else:
            return  # recorded before the recording of the step began
        self._host = max(self._host, until) + (_READ if self._is_asynchronous else 0.0)

    def _mark(self, event: MarkEvent) -> None:
        self._phase = event.phase
        self._found.marks.append((event, max(self._compute, self._host)))


def _name_of(stream: int) -> str:
    return COMPUTE if stream == COMPUTE_STREAM else f"stream {stream}"


def marked_parts(events: Sequence[TraceEvent]) -> list[tuple[MarkEvent, Sequence[TraceEvent]]]:
    """Returns the parts of a step, each with the mark that begins it."""
    starts = [place for place, event in enumerate(events) if isinstance(event, MarkEvent)]
    found: list[tuple[MarkEvent, Sequence[TraceEvent]]] = []
    for start, end in zip(starts, [*starts[1:], len(events)], strict=True):
        mark = events[start]
        assert isinstance(mark, MarkEvent)
        found.append((mark, events[start:end]))
    return found
