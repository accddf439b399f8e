"""Simulates the start of thousands of ranks: the package's own calls of the store, with a simulated clock.

Every rank is a thread that runs the code of a rank between its first call and its first step: admission, comparison of
configurations and models, and the barriers before process groups are made. One rank runs at a time. Calls of the store
queue at one server, and only calls and sleeps move the clock, so the result does not depend on the load of the machine.
``--rates`` measures torch's ``TCPStore`` on this machine; the report states the rates that the prediction used.
Run: ``python -m benchmarks.start [--ranks N ...] [--rates] [--out FILE]``.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as torch_dist

from deepspeed.comm.start import admission, startup
from deepspeed.comm.start.admission import JoiningProcess, receive_ranks
from deepspeed.comm.start.startup import RankInfo, agree_on_config, agree_on_model
from deepspeed.comm.watch import barrier, watchdog
from deepspeed.comm.watch.watchdog import WaitRecord, Watch
from deepspeed.ports import free_port

_TIMEOUT = timedelta(minutes=30)
_GROUPS = 6  # barriers before process groups are made: for three axes with a communicator and a gloo group each


@dataclass(frozen=True)
class StoreRates:
    """Speed of a store: operations, further keys of one operation, and bytes, per second.

    The defaults are below the rates of torch's store that ``--rates`` has measured on two busy cores.
    """

    operations: float = 15_000.0
    keys: float = 90_000.0
    bytes: float = 200e6

    def seconds(self, keys: int, size: int) -> float:
        """Returns the seconds that the server needs for one operation."""
        return 1 / self.operations + (keys - 1) / self.keys + size / self.bytes


class _Parked:
    """A thread that is blocked until its ``turn``."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self.turn.acquire()
        self.is_over = False


@contextmanager
def _on_one_core() -> Iterator[None]:
    """Pins threads that are started inside to one core. Only one runs at a time, and switching is faster there."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


class VirtualClock:
    """Runs threads one at a time, in the order of a clock that only sleeps and calls of the store move.

    For other threads of the process, such as an earlier job's watch, it is the module :mod:`time`.

    Attributes:
        now: Seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, _Parked]] = []
        self._numbers = itertools.count()
        self._idle = threading.Lock()
        self._errors: list[BaseException] = []
        self._this_thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        """Returns the clock's time, as :func:`time.monotonic`."""
        return self.now if self._runs_this_thread() else time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Blocks this thread for ``seconds`` of the simulated clock while the others run."""
        if self._runs_this_thread():
            self.park(self.now + seconds)
        else:
            time.sleep(seconds)

    def _runs_this_thread(self) -> bool:
        return getattr(self._this_thread, "is_simulated", False)

    def park(self, moment: float, until: _Parked | None = None) -> None:
        """Blocks this thread until the simulated clock reads ``moment``, or until :meth:`wake`; the others run."""
        parked = until or _Parked()
        heapq.heappush(self._waiting, (moment, next(self._numbers), parked))
        self._pass_on()
        parked.turn.acquire()

    def wake(self, parked: _Parked, moment: float) -> None:
        """Ends :meth:`park` of another thread at ``moment``."""
        heapq.heappush(self._waiting, (moment, next(self._numbers), parked))

    def _pass_on(self) -> None:
        while self._waiting:
            moment, _, parked = heapq.heappop(self._waiting)
            if not parked.is_over:
                parked.is_over = True
                self.now = max(self.now, moment)
                parked.turn.release()
                return
        self._idle.release()

    def run(self, starts: Sequence[tuple[float, Callable[[], None]]]) -> None:
        """Starts every function in a thread of its own at its time of the clock; returns when all have ended.

        Raises:
            BaseException: What one of them has raised.
        """

        def work(parked: _Parked, function: Callable[[], None]) -> None:
            self._this_thread.is_simulated = True
            parked.turn.acquire()
            try:
                function()
            except BaseException as error:
                self._errors.append(error)
            finally:
                self._pass_on()

        before = threading.stack_size(512 * 1024)
        with _on_one_core():
            for moment, function in starts:
                parked = _Parked()
                heapq.heappush(self._waiting, (moment, next(self._numbers), parked))
                threading.Thread(target=work, args=(parked, function), daemon=True).start()
        threading.stack_size(before)
        self._idle.acquire()
        self._pass_on()
        self._idle.acquire()
        if self._errors:
            raise self._errors[0]


class SimulatedStore:
    """A store in this process that counts its operations.

    Attributes:
        count: Number of operations, by name.
        bytes: Bytes sent and received, without those of the protocol.
        busy_seconds: Seconds in which the server was busy.
    """

    def __init__(self, clock: VirtualClock | None = None, rates: StoreRates | None = None) -> None:
        self.count: Counter[str] = Counter()
        self.bytes = 0
        self._store = torch_dist.HashStore()
        self._clock, self._rates = clock, rates or StoreRates()
        self._free_at = 0.0
        self.busy_seconds = 0.0
        self._parked: dict[str, list[_Parked]] = defaultdict(list)

    @property
    def operations(self) -> int:
        """Returns the number of all operations."""
        return sum(self.count.values())

    def has_extended_api(self) -> bool:
        """Returns True, as torch's store over TCP does."""
        return True

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Waits until the only one of ``keys`` is set.

        Raises:
            RuntimeError: It was not set within ``timeout``.
        """
        assert self._clock is not None and len(keys) == 1
        self._serve("wait", 1, _length(keys))
        if self._store.check(keys):
            return
        parked = _Parked()
        self._parked[keys[0]].append(parked)
        self._clock.park(self._clock.now + timeout.total_seconds(), parked)
        if not self._store.check(keys):
            raise RuntimeError("wait timeout")

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def counted(*args: Any) -> Any:
            keys = args[0] if isinstance(args[0], list) else [args[0]]
            found = call(*args)
            self._serve(name, len(keys), sum(_length(each) for each in (*args, found)))
            for key in keys if self._clock is not None and name in ("set", "multi_set", "add", "compare_set") else ():
                for parked in self._parked.pop(key, ()):
                    self._free_at += self._note("answer to a wait", 1, 8)
                    self._clock.wake(parked, self._free_at)
            return found

        return counted

    def _serve(self, name: str, keys: int, size: int) -> None:
        """Queues an operation at the server and waits until it is done."""
        seconds = self._note(name, keys, size)
        if self._clock is not None:
            self._free_at = max(self._free_at, self._clock.now) + seconds
            self._clock.park(self._free_at)

    def _note(self, name: str, keys: int, size: int) -> float:
        self.count[name] += 1
        self.bytes += size
        seconds = self._rates.seconds(keys, size)
        self.busy_seconds += seconds
        return seconds


def _length(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    return sum(map(_length, value)) if isinstance(value, list) else 8


@dataclass
class SimulatedStart:
    """Costs of a simulated start.

    Attributes:
        ranks: Number of ranks.
        seconds: Predicted seconds from the first rank's first call to the last rank's last one.
        operations: Operations of the store; the late answer to a wait counts as another one.
        bytes: Bytes sent and received by the store.
        busy_seconds: Seconds in which the store was busy.
    """

    ranks: int
    seconds: float
    operations: int
    bytes: int
    busy_seconds: float


@contextmanager
def _time_of(clock: VirtualClock) -> Iterator[None]:
    with ExitStack() as stack:
        for module in (admission, startup, watchdog):
            stack.enter_context(mock.patch.object(module, "time", clock))
        yield


def _joining(rank: int, ranks: int) -> JoiningProcess:
    facts = RankInfo(f"node-{rank // 8:05d}", 1000 + rank, rank % 8, "cuda", 8, "1.0.0", "nccl", "10.20.30.40")
    return JoiningProcess(rank, ranks, "Slurm step 4711.0", "python train.py", "0123456789abcdef", 1, facts)


# A process of another machine: whether it has ended cannot be seen from here.
_ELSEWHERE = '["00000000-0000-0000-0000-000000000000 pid:[4026531836]", 1000, "123456789"]'
CONFIG = {"train_batch_size": 8192, "zero_optimization.stage": 3, "optimizer.type": "AdamW"}
MODEL = [f"layers.{number}.weight: [8192, 8192] float32" for number in range(80)]


class _Rank:
    """Runs one rank's start: the calls of the package that use the store, in their order."""

    def __init__(self, store: Any, rank: int, members: tuple[int, ...]) -> None:
        self._store, self._rank, self._members = store, rank, members

    def __call__(self) -> None:
        size = len(self._members)
        prefix, _, _ = receive_ranks(self._store, _joining(self._rank, size), "node-00000:29500", _TIMEOUT)
        watch = Watch(_Prefixed(self._store, prefix), "job", self._rank, size)
        watch._begin_watching = lambda: None  # type: ignore[method-assign]  # simulate_wait() has its checks
        try:
            self._compare(watch, size)
            for number in range(_GROUPS):
                barrier.store_barrier(watch, f"group {number}", self._members, _TIMEOUT)
            barrier.store_barrier(
                watch, "the members of groups", self._members, _TIMEOUT, f"{self._rank // 8 * 8} 12345678"
            )
        finally:
            watch.stop()

    def _compare(self, watch: Watch, size: int) -> None:
        for compare, what in ((agree_on_config, CONFIG), (agree_on_model, MODEL)):
            store = barrier.SupervisedStore(watch, compare.__name__, self._members)
            compare(store, "topic", self._rank, size, what, _TIMEOUT)  # type: ignore[operator]


class _Prefixed:
    """Adds a prefix to the keys of a store, as torch's ``PrefixStore``."""

    def __init__(self, store: SimulatedStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)
        if name == "has_extended_api":
            return call
        return lambda keys, *more: call(
            [f"{self._prefix}/{key}" for key in keys] if isinstance(keys, list) else f"{self._prefix}/{keys}", *more
        )


def simulate_start(ranks: int, rates: StoreRates | None = None, spread: float = 2.0) -> SimulatedStart:
    """Simulates the start of a job.

    Args:
        ranks: Number of ranks.
        rates: Speed of the store.
        spread: Seconds between the starts of the first and the last process.
    """
    clock = VirtualClock()
    store = SimulatedStore(clock, rates)
    members = tuple(range(ranks))
    starts = [(spread * rank / ranks, _Rank(store, rank, members)) for rank in members]
    with _time_of(clock):
        clock.run(starts)
    return SimulatedStart(ranks, clock.now, store.operations, store.bytes, store.busy_seconds)


@dataclass(frozen=True)
class SimulatedWait:
    """Costs of a long wait of all ranks but one.

    Attributes:
        ranks: Number of ranks.
        period: Seconds between the checks of a rank.
        operations: Operations of the store in each period.
        bytes: Bytes sent and received by the store in each period.
        found_after: Periods until the divergence of two ranks was reported; None: nothing diverged.
    """

    ranks: int
    period: float
    operations: list[int]
    bytes: list[int]
    found_after: int | None


def simulate_wait(ranks: int, diverged: int | None = None, periods: int = 2) -> SimulatedWait:
    """Simulates a wait that does not end.

    Args:
        ranks: Number of ranks.
        diverged: Rank that waits for another transfer than the others; None: the last rank is late and the others wait.
        periods: Number of checks of each rank.
    """
    store = SimulatedStore()
    members = tuple(range(ranks))
    with mock.patch.object(watchdog, "this_process", lambda: _ELSEWHERE):
        watches = [Watch(store, "job", rank, ranks) for rank in members]
    for rank, watch in enumerate(watches):
        channel = "reductions" if rank == diverged else "gathers"
        watch.issue(channel)
        watch._awaited = WaitRecord(channel, 1, members, f"the transfer of {channel}", float("-inf"))
    waiting = watches if diverged is not None else watches[:-1]
    operations, sizes = [], []
    found: int | None = None
    for period in range(1, periods + 1):
        before, size = store.operations, store.bytes
        goes_on = [watch.look_after_long_wait() for watch in waiting]
        operations.append(store.operations - before)
        sizes.append(store.bytes - size)
        if not all(goes_on):
            found = period
            break
    for watch in watches:
        watch.stop()
    return SimulatedWait(ranks, watches[0].period, operations, sizes, found)


# --- the speed of a store ---------------------------------------------------------------------------------------------


def measure_rates(seconds: float = 3.0, clients: int = 16) -> StoreRates:
    """Measures torch's ``TCPStore`` on this machine, whose cores serve the clients too.

    Args:
        seconds: Duration of each of the three measurements.
        clients: Number of connections, each with a thread that sends a request as soon as it has the last answer.
    """
    port = free_port()
    server = torch_dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    stores = [torch_dist.TCPStore("127.0.0.1", port, wait_for_workers=False) for _ in range(clients)]
    many = [f"key{number}" for number in range(2048)]
    server.multi_set(many, ["x" * 200] * len(many))  # type: ignore[attr-defined]
    server.set("large", "x" * 1_000_000)

    def per_second(request: Callable[[Any], object]) -> float:
        end = time.monotonic() + seconds

        def work(store: Any) -> int:
            count = 0
            while time.monotonic() < end:
                request(store)
                count += 1
            return count

        with ThreadPoolExecutor(clients) as pool:
            return sum(pool.map(work, stores)) / seconds

    single = per_second(lambda store: store.check(["key7"]))
    keys = per_second(lambda store: store.multi_get(many)) * len(many)
    return StoreRates(single, keys, per_second(lambda store: store.get("large")) * 1e6)


def report(ranks: Sequence[int], rates: StoreRates, measured: StoreRates | None) -> str:
    """Simulates starts and waits; returns the report in Markdown."""
    lines = [
        "# The start of thousands of ranks, simulated",
        "",
        (__doc__ or "").split("\n\n")[1].replace("\n", " "),
        "",
    ]
    lines.append(f"Predicted with: {_shown(rates)}.")
    if measured is not None:
        lines.append(f"Measured here ({os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}): {_shown(measured)}.")
    lines += ["", "| ranks | seconds | store busy | operations | per rank | MB |", "|---|---|---|---|---|---|"]
    for count in ranks:
        start = simulate_start(count, rates)
        lines.append(
            f"| {count:,} | {start.seconds:.1f} | {start.busy_seconds:.1f} | {start.operations:,} | "
            f"{start.operations / count:.1f} | {start.bytes / 1e6:.0f} |"
        )
    lines += ["", _LEFT_OUT, "", "All ranks wait for one that is late:", ""]
    lines.append("| ranks | seconds between checks | operations per second | MB per second | divergence found after |")
    lines.append("|---|---|---|---|---|")
    for count in ranks:
        late, diverged = simulate_wait(count), simulate_wait(count, diverged=count // 3, periods=8)
        lines.append(
            f"| {count:,} | {late.period:.1f} | {late.operations[-1] / late.period:,.0f} | "
            f"{late.bytes[-1] / late.period / 1e6:.1f} | {diverged.found_after} checks |"
        )
    lines += ["", f"The simulation took {time.process_time():.0f} s of one core."]
    return "\n".join([*lines, ""])


_LEFT_OUT = (
    "The processes start within 2 s. Not simulated: NCCL's own rendezvous, and one read of its identifier per rank and "
    "communicator."
)


def _shown(rates: StoreRates) -> str:
    return (
        f"{rates.operations:,.0f} operations, {rates.keys:,.0f} further keys of one operation and "
        f"{rates.bytes / 1e6:,.0f} MB per second"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 4096, 10_000, 16_384])
    parser.add_argument("--rates", action="store_true", help="measure torch's store on this machine too")
    parser.add_argument("--out", type=Path, help="file for the report")
    options = parser.parse_args()
    text = report(options.ranks, StoreRates(), measure_rates() if options.rates else None)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
