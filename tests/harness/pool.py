"""The pool of warm worker processes and the call that uses it.

Workers are forked from servers that have imported torch and done nothing else (``tests.harness.fork_server``), and are
reused; a run that hangs or kills a worker costs the whole pool, which the next run builds again in milliseconds. A run
that must see an interpreter as a user's process has it, with its own memory, requests ``fresh="interpreter"``.
"""

import atexit
import contextlib
import itertools
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeVar

from tests.harness import event_loops, pickling
from tests.harness.errors import RankDied, RankReport, RanksFailed, RanksTimedOut
from tests.harness.fork_server import ForkedProcess, ForkServer, shared_addresses
from tests.harness.worker import DUMP_STACKS, Call, Raised

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT = 180.0  # seconds until a worker has imported torch, on a busy machine
PEER_LIMIT = 20.0  # what the other ranks get after the first failure
LEAVE_LIMIT = 5.0  # how long ranks that returned keep their process groups for the others
CLEAN_UP_LIMIT = 60.0  # what a rank gets to take down its process group

T = TypeVar("T")


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float = 150,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
    fresh: bool | Literal["interpreter"] = False,
    **kwargs: Any,
) -> list[T]:
    """Runs ``fn(*args, **kwargs)`` as ``world_size`` ranks and returns what each returned, in rank order.

    Every rank finds an initialized process group, RANK, LOCAL_RANK, WORLD_SIZE and MASTER_* in its environment, one
    thread and equal seeds. Results travel by pickle, tensors as CPU copies. ``pytest.skip`` in a rank skips the test.

    Args:
        fn: A module-level function (the workers import it by name).
        world_size: Number of ranks.
        *args: Arguments of ``fn``, the same for every rank.
        timeout: Seconds that the run may take, without the start of the workers.
        backend: Backend of the process group; None leaves it to ``fn`` to make one.
        env: Further environment variables, for this run only.
        fresh: Use new processes and end them afterwards, for what cannot be undone (signal handlers, threads).
            ``"interpreter"``: they import everything themselves, so none of their memory is another process's, and
            nothing is preloaded: gloo and malloc are as in a user's process.
        **kwargs: Keyword arguments of ``fn``.

    Raises:
        RanksFailed: A rank raised; the message has all tracebacks, the first failure on top.
        RankDied: A worker process ended.
        RanksTimedOut: The run took too long; the message has the stacks of all ranks.
    """
    payload = _pack(fn, args, kwargs)
    pool = Pool(is_forked=fresh != "interpreter") if fresh else _shared_pool()
    try:
        outcome = pool.run(payload, world_size, timeout, backend, dict(env or {}))
    finally:
        if fresh:
            pool.close()
    return [pickling.loads(data) for data in outcome]


def shut_down() -> None:
    """Ends the shared workers. The next run starts new ones."""
    global _shared
    if _shared is not None:
        _shared.close()
        _shared = None
    while _servers:
        _servers.pop().close()


class Worker:
    """One process: its connection, its captured output and its file of stacks."""

    def __init__(self, number: int, directory: Path, server: ForkServer | None) -> None:
        ours, theirs = socket.socketpair()
        self.output = open(directory / f"output-{number}", "w+b")  # noqa: SIM115 - lives as long as the worker
        self.stacks = open(directory / f"stacks-{number}", "w+b")  # noqa: SIM115
        environ = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", PYTHONUNBUFFERED="1")
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with theirs:
            descriptors = (theirs.fileno(), self.stacks.fileno())
            if server is not None:
                self.process = server.fork(environ, self.output.fileno(), *descriptors)
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "tests.harness.worker", *map(str, descriptors)],
                    cwd=ROOT,
                    env=event_loops.without_library(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=self.output,
                    stderr=subprocess.STDOUT,
                    pass_fds=descriptors,
                )
        self.connection = Connection(ours.detach())

    def start_run(self) -> None:
        """Clears the output of earlier runs."""
        for file in (self.output, self.stacks):
            # The worker shares the open file, its position included.
            file.seek(0)
            file.truncate()

    def read(self, which: str) -> str:
        path = Path(getattr(self, which).name)
        return path.read_text(errors="replace").replace("\0", "")

    def dump_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(DUMP_STACKS)

    def close(self) -> None:
        self.connection.close()
        try:
            self.process.wait(0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.output.close()
        self.stacks.close()


class Pool:
    """Workers 0..n-1; grows to the largest world size requested."""

    def __init__(self, is_forked: bool = True) -> None:
        self.is_forked = is_forked
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.workers: list[Worker] = []
        self.awaiting_hello: set[int] = set()
        self.runs = itertools.count()

    def close(self) -> None:
        for worker in self.workers:
            worker.process.terminate()
        for worker in self.workers:
            worker.close()
        self.workers = []
        self.awaiting_hello = set()
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(
        self, payload: bytes, world_size: int, timeout: float, backend: str | None, environ: dict[str, str]
    ) -> list[bytes]:
        """Executes one run and returns the pickled results. Closes the pool if a worker cannot be used again."""
        try:
            return _Run(self._ranks(world_size), self).execute(
                payload, timeout, backend, environ, self.directory / f"rendezvous-{next(self.runs)}"
            )
        except _PoolLost as lost:
            self._rebuild()
            raise lost.error from None
        except (RanksFailed, _Skipped) as error:
            if isinstance(error, _Skipped):
                import pytest

                pytest.skip(error.reason)
            raise
        except BaseException:
            # An interrupt or pytest's own time-out: the workers are somewhere in the middle.
            self._rebuild()
            raise

    def _ranks(self, world_size: int) -> list[Worker]:
        while len(self.workers) < world_size:
            self.awaiting_hello.add(len(self.workers))
            number = len(self.workers)
            servers = _fork_servers() if self.is_forked else None
            server = servers[number % len(servers)] if servers else None
            self.workers.append(Worker(number, self.directory, server))
        deadline = time.monotonic() + START_LIMIT
        for number in sorted(self.awaiting_hello):
            worker = self.workers[number]
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                raise _PoolLost(
                    RanksTimedOut(f"worker {number} did not start in {START_LIMIT:.0f} s", [_state(number, worker)])
                )
            try:
                worker.connection.recv()
            except (EOFError, OSError):
                worker.process.wait()
                raise _PoolLost(RankDied(f"worker {number} did not start", [_state(number, worker)])) from None
            self.awaiting_hello.discard(number)
        return self.workers[:world_size]

    def _rebuild(self) -> None:
        self.close()
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-"))


class _PoolLost(Exception):
    """The run failed with ``error`` and its workers cannot be used again."""

    def __init__(self, error: RanksFailed) -> None:
        self.error = error


class _Skipped(Exception):
    def __init__(self, reason: str) -> None:
        self.reason = reason


class _Run:
    """One call in flight: sends the work to the workers, collects results, and builds the error of a failed run."""

    def __init__(self, workers: list[Worker], pool: Pool) -> None:
        self.workers = workers
        self.results: dict[int, bytes] = {}
        self.raised: dict[int, Raised] = {}
        self.died: dict[int, str] = {}
        self.leaving: set[int] = set()  # ranks that returned and may take down their process groups
        self.ready: set[int] = set()

    def execute(
        self, payload: bytes, timeout: float, backend: str | None, environ: dict[str, str], rendezvous: Path
    ) -> list[bytes]:
        size, port = len(self.workers), _free_port()
        for rank, worker in enumerate(self.workers):
            worker.start_run()
            call = Call(payload, rank, size, timeout, str(rendezvous), port, backend, environ)
            try:
                worker.connection.send(call)
            except OSError:
                self._note_death(rank)
        self._gather(timeout)
        headline, unfinished = self._verdict(timeout), self._unfinished()
        if unfinished:
            self._collect_stacks(unfinished)
        error = self._error(headline, unfinished)
        is_broken = not all(raised.has_entered for raised in self.raised.values())
        if unfinished or self.died or is_broken or len(self.ready) < size:
            raise _PoolLost(error or self._stuck_cleaning_up())
        if error is not None:
            skips = [raised.skip_reason for raised in self.raised.values()]
            if all(reason is not None for reason in skips):
                raise _Skipped(str(skips[0]))
            raise error
        self._replay_output()
        return [self.results[rank] for rank in range(size)]

    def _gather(self, timeout: float) -> None:
        """Reads messages until every rank has cleaned up, or there is nothing left to wait for."""
        deadline, leave = time.monotonic() + timeout, float("inf")
        shortened = answered = False
        while len(self.ready) + len(self.died) < len(self.workers):
            if (self.raised or self.died) and not shortened:
                deadline, shortened = min(deadline, time.monotonic() + PEER_LIMIT), True
            if not self._unfinished() and not answered:
                deadline, answered = time.monotonic() + CLEAN_UP_LIMIT, True
            if self.results:
                leave = min(leave, time.monotonic() + LEAVE_LIMIT)
            if answered or shortened or time.monotonic() >= leave:
                self._let_leave()
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            pending = {
                worker.connection: rank
                for rank, worker in enumerate(self.workers)
                if rank not in self.ready and rank not in self.died
            }
            messages = wait(list(pending), timeout=min(remaining, 0.5))
            for connection in messages:
                self._receive(pending[connection], connection)
            # A grandchild may hold a dead worker's connection open, so where none speaks, its end is looked for too.
            for rank in pending.values() if not messages else ():
                if self.workers[rank].process.poll() is not None and not self.workers[rank].connection.poll():
                    self._note_death(rank)

    def _let_leave(self) -> None:
        for rank in self.results.keys() - self.leaving:
            self.leaving.add(rank)
            with contextlib.suppress(OSError):  # its death is noticed where its messages are read
                self.workers[rank].connection.send("leave")

    def _receive(self, rank: int, connection: Any) -> None:
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            self._note_death(rank)
            return
        if kind == "returned":
            self.results[rank] = value
        elif kind == "raised":
            self.raised[rank] = value
        else:
            self.ready.add(rank)

    def _note_death(self, rank: int) -> None:
        if rank in self.died:
            return
        code = self.workers[rank].process.wait()
        if code < 0:
            self.died[rank] = f"died of {signal.Signals(-code).name} (signal {-code})"
        else:
            self.died[rank] = f"exited with code {code} in the middle of the run"
        self.results.pop(rank, None)

    def _unfinished(self) -> list[int]:
        done = self.results.keys() | self.raised.keys() | self.died.keys()
        return [rank for rank in range(len(self.workers)) if rank not in done]

    def _verdict(self, timeout: float) -> str:
        size = len(self.workers)
        if self.died:
            return f"{len(self.died)} of {size} ranks died"
        if self.raised:
            return f"{len(self.raised)} of {size} ranks failed"
        return f"the run did not finish in {timeout:g} s"

    def _error(self, headline: str, unfinished: list[int]) -> RanksFailed | None:
        if not (self.raised or self.died or unfinished):
            return None
        kind = RankDied if self.died else RanksFailed if self.raised else RanksTimedOut
        return kind(headline, [self._report(rank) for rank in range(len(self.workers))])

    def _report(self, rank: int) -> RankReport:
        worker = self.workers[rank]
        output = worker.read("output")
        if rank in self.died:
            # A dead rank is the cause of what the others report afterwards, so it comes first.
            return RankReport(rank, self.died[rank], worker.read("stacks"), output, when=0.0)
        if rank in self.raised:
            raised = self.raised[rank]
            exception = pickling.loads(raised.pickled) if raised.pickled else None
            return RankReport(rank, f"raised {raised.summary}", raised.traceback, output, exception, raised.when)
        if rank in self.results:
            return RankReport(rank, "finished", "", output)
        return RankReport(rank, "still running", worker.read("stacks"), output)

    def _collect_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.workers[rank].dump_stacks()
        # The handler writes from C at once, whatever the thread waits for; wait until the files stop growing.
        sizes: list[int] = []
        for _ in range(20):
            time.sleep(0.1)
            now = [Path(self.workers[rank].stacks.name).stat().st_size for rank in ranks]
            if all(now) and now == sizes:
                return
            sizes = now

    def _stuck_cleaning_up(self) -> RanksFailed:
        stuck = [rank for rank in range(len(self.workers)) if rank not in self.ready]
        hung = "returned, then hung in cleaning up (is a collective still in flight?)"
        self._collect_stacks(stuck)
        reports = [
            RankReport(
                rank,
                hung if rank in stuck else "finished",
                self.workers[rank].read("stacks"),
                self.workers[rank].read("output"),
            )
            for rank in range(len(self.workers))
        ]
        return RanksTimedOut(f"ranks {stuck} did not clean up in {CLEAN_UP_LIMIT:g} s", reports)

    def _replay_output(self) -> None:
        """Prints the output of the ranks, so that pytest shows it when the test fails later."""
        for rank, worker in enumerate(self.workers):
            for line in worker.read("output").splitlines():
                print(f"[rank {rank}] {line}")


def _state(number: int, worker: Worker) -> RankReport:
    code = worker.process.poll()
    outcome = "still starting" if code is None else f"exited with code {code}"
    return RankReport(number, outcome, worker.read("stacks"), worker.read("output"))


def _pack(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    name = f"{fn.__module__}.{fn.__qualname__}" if hasattr(fn, "__qualname__") else repr(fn)
    if "<" in name or getattr(fn, "__module__", "") == "__main__":
        raise TypeError(
            f"run_ranks needs a module-level function of an importable module, not {name}: workers import it"
        )
    try:
        return pickling.dumps((fn, args, kwargs))
    except (pickle.PickleError, TypeError, AttributeError) as error:
        raise TypeError(f"run_ranks cannot send {name} and its arguments to the workers: {error}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("auto", "bert", "gpt2", "llama", "mixtral")]
"""Modules that take each worker seconds and that many tests use. Servers import them beforehand in a run of all tests,
or if pytest's own process has loaded the library's models."""

_shared: Pool | None = None
_servers: list[ForkServer] = []


def _fork_servers() -> list[ForkServer]:
    """Returns the two servers. Starts them at the first call, and again after one was closed."""
    if not _servers:
        atexit.register(shut_down)
    _servers[:] = [server for server in _servers if not server.is_closed]
    modules = MODELS if "transformers.modeling_utils" in sys.modules else []
    while len(_servers) < 2:
        unused = [address for address in shared_addresses() if address not in {server.shared for server in _servers}]
        _servers.append(ForkServer(modules, unused[0] if unused else None))
    return _servers


def _shared_pool() -> Pool:
    global _shared
    if _shared is None:
        _shared = Pool()
    return _shared
