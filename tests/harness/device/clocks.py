"""Who works when, as vector clocks: the host, every stream of the device, every buffer's transfers to the disk.

An *actor* does its work in one order. Its clock has, for every actor, how much of that one's work is certainly over
before its own next piece of work begins. Two pieces of work are ordered if the later one's clock contains the earlier
one; nothing is measured, so one run stands for every speed that the actors may have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import sleep
from typing import Any

from tests.harness.device.jobs import Job, JobQueue, unfinished


class Actor:
    """Executes its work in one order: the host, a stream, or a file's transfers.

    Attributes:
        name: For sentences.
        time: Pieces of work so far.
        known: Per actor, how much of its work is over before the next piece of this one's.
        num_learnt: How often ``known`` has changed in what it says of other actors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.time = 0
        self.known: dict[Actor, int] = {}
        self.num_learnt = 0
        self._followed: dict[Actor, int] = {}  # what ``num_learnt`` of others was when this one has learnt all of it

    def __repr__(self) -> str:
        return self.name

    def work(self) -> int:
        """Starts a piece of work and returns its number."""
        self.time += 1
        self.known[self] = self.time
        return self.time

    def has_seen(self, other: Actor, time: int) -> bool:
        """Whether piece ``time`` of ``other`` is over before what this one does next."""
        return other is self or self.known.get(other, 0) >= time

    def learn(self, known: dict[Actor, int]) -> None:
        """Merges ``known`` into this actor's clock: what is over there is over for this actor too."""
        mine = self.known
        for actor, time in known.items():
            if mine.get(actor, 0) < time:
                mine[actor] = time
                self.num_learnt += 1

    def follow(self, other: Actor) -> None:
        """Does ``learn(other.known)``, unless ``other`` has not changed since the last call."""
        num_learnt = other.num_learnt
        if self._followed.get(other) == num_learnt:
            self.learn({other: other.time})
        else:
            self.learn(other.known)
            self._followed[other] = num_learnt


class Clocks:
    """The host and the streams of one device.

    Attributes:
        host: All host code, whatever its thread.
        default: The default stream.
        current: The stream that work is queued on now.
        device_is_quick: What an event that nobody has waited for answers when it is asked: whether it was reached.
            One that was recorded before the host slept was reached in any case.
        naps: How often the host has slept.
        launches: Kernels and copies that the host has queued.
        waits: How often the host has waited for the device.
        has_peers: Whether the other ranks are processes that really take part.
    """

    def __init__(self, *, device_is_quick: bool = False) -> None:
        self.host = Actor("the host")
        self.default = Stream(self, "the default stream")
        self.current = self.default
        self.device_is_quick = device_is_quick
        self.naps = 0
        self.streams = [self.default]
        self.launches = self.waits = 0
        self.has_peers = False
        self._unnamed = 0

    def new_stream(self, name: str | None = None) -> Stream:
        """Returns a stream that is ordered only after what the host has seen."""
        self._unnamed += name is None
        made = Stream(self, name or f"stream {self._unnamed}")
        self.streams.append(made)
        return made

    def new_event(self, *_arguments: Any, **_options: Any) -> Event:
        """Returns an event. Ignores timing and other arguments."""
        return Event(self)

    def over_on(self, stream: Stream) -> Callable[[], bool]:
        """Returns a test of whether the work queued on ``stream`` until now is over; orders nothing."""
        return stream.record_event().is_reached

    def nap(self, seconds: float) -> None:
        """Lets the host sleep while the device finishes its work. Other ranks, if any, continue at their own pace."""
        self.naps += 1
        if self.has_peers:
            sleep(seconds)

    def launch(self) -> Actor:
        """Counts a kernel that the host queues now, and returns its actor."""
        self.launches += 1
        return self.allocate()

    def allocate(self) -> Actor:
        """Returns the stream that owns memory which the host allocates now."""
        self.current.follow(self.host)
        return self.current

    def close(self) -> None:
        """Ends the threads of the streams."""
        for stream in self.streams:
            stream.close()

    def synchronize(self) -> None:
        """The host waits for all streams."""
        self.waits += 1
        for stream in self.streams:
            stream.finish()
            self.host.follow(stream)


class Stream(Actor):
    """A stream of the device, with the methods of ``torch.Stream`` that matter."""

    def __init__(self, clocks: Clocks, name: str) -> None:
        super().__init__(name)
        self._clocks = clocks
        self.jobs: tuple[Job, ...] = ()  # of other ranks and threads, which are not over when they are queued
        self._queue: JobQueue | None = None

    def put(self, run: Callable[[], None]) -> Job:
        """Runs a kernel in the stream's own thread, behind what the stream waits for."""
        if self._queue is None:
            self._queue = JobQueue(self.name)
        job = self._queue.put(run, self.jobs)
        self.jobs = (job,)
        return job

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    def finish(self) -> None:
        """Blocks until the jobs that this stream waits for are over."""
        for job in self.jobs:
            job.wait()
        self.jobs = ()

    def wait_stream(self, other: Stream) -> None:
        self.follow(self._clocks.host)
        self.follow(other)
        self.jobs = unfinished(self.jobs, other.jobs)

    def wait_event(self, event: Event) -> None:
        self.follow(self._clocks.host)
        self.learn(event.known)
        self.jobs = unfinished(self.jobs, event.jobs)

    def record_event(self, event: Event | None = None) -> Event:
        event = event if event is not None else Event(self._clocks)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self._clocks.waits += 1
        self.finish()
        self._clocks.host.follow(self)

    def query(self) -> bool:
        return self.record_event().query()


class Event:
    """An event of the device, with the methods of ``torch.Event``."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._naps = clocks.naps
        self.known: dict[Actor, int] = {}
        self.jobs: tuple[Job, ...] = ()

    def record(self, stream: Stream | None = None) -> None:
        stream = stream if stream is not None else self._clocks.current
        self.known = {**stream.known}
        self.jobs = unfinished(stream.jobs)
        self._naps = self._clocks.naps

    def wait(self, stream: Stream | None = None) -> None:
        (stream if stream is not None else self._clocks.current).wait_event(self)

    def synchronize(self) -> None:
        self._clocks.waits += 1
        for job in self.jobs:
            job.wait()
        self._clocks.host.learn(self.known)

    def query(self) -> bool:
        is_reached = self.is_reached()
        if is_reached and (not self._clocks.has_peers or threading.current_thread() is threading.main_thread()):
            self._clocks.host.learn(self.known)
        return is_reached

    def is_reached(self) -> bool:
        """Returns whether the device has reached the event. Adds no ordering, unlike :meth:`query`."""
        if self._clocks.has_peers:  # jobs of other ranks say how far the device is
            return not unfinished(self.jobs)
        host = self._clocks.host
        if self._clocks.device_is_quick or self._naps < self._clocks.naps:
            return True
        return all(host.has_seen(actor, time) for actor, time in self.known.items())

    def elapsed_time(self, _end: Event) -> float:
        return 0.0
