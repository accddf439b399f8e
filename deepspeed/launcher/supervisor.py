"""The process that owns the ranks: it starts them, reports how each ended, and stops them.

It writes nothing to the terminal before all ranks have ended: a blocked terminal must not keep it from stopping them.
It runs in a separate session, so that signals to the front's process group do not reach it. It ends when the front
requests it, when the front has ended, or when all ranks have ended; it then leaves no descendants.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import FrameType

from deepspeed.launcher import processes
from deepspeed.launcher.forked import IMPORTS, fork_rank

# Seconds that ranks get between the first signal and KILL. A user's signal leaves time for handlers; after a failure
# the other ranks mostly wait for a peer that is gone. With what follows, all stay well below 10 seconds.
GRACE_AFTER_SIGNAL = 5.0
GRACE_AFTER_FAILURE = 3.0
_GRACE_FOR_LEFTOVERS = 1.0
_POLL_SECONDS = 0.02
# Schedulers announce the end of a run with these; the ranks handle them.
_HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def handed_on_signals(stop_signal: int | None) -> set[int]:
    """Returns the signals that are forwarded to the ranks and do not end the run by themselves."""
    handed_on: set[int] = {*_HANDED_ON} if stop_signal is None else {*_HANDED_ON, stop_signal}
    return handed_on - {signal.SIGTERM, signal.SIGINT}  # these two end the run


@dataclass(frozen=True)
class Worker:
    """One rank to start."""

    rank: int  # global rank
    local_rank: int  # rank on this machine
    command: tuple[str, ...]  # program and arguments
    environment: dict[str, str] = field(repr=False)  # the complete environment
    cores: tuple[int, ...] | None = None  # the processor cores it may use; None for all that this process may
    name: str = ""  # its name in messages; empty: its rank


class Supervisor:
    """Starts and stops workers, and reports their state to the front.

    Messages are JSON objects, one per line. To the front, by ``event``: ``started`` (rank, pid), ``failed_to_start``
    (rank, reason), ``exited`` (rank, time, and status as from ``subprocess``: minus the signal's number for a signal),
    ``signalled`` (signal: this process itself got one), ``done`` (leftovers, stuck). From the front: what to send the
    ranks (signal) and how long they may take (grace, seconds; null: they need not end); or which rank alone gets the
    signal, with its children (rank).

    Args:
        pipes: (stdout, stderr) write ends per worker; closed here once the workers have them.
        grace: Seconds in which ranks may save after a signal to stop; None: the default. If given, the signal is sent
            to the ranks only, as their children, such as data loaders, are needed until the step is over.
        handed_on: Signals that do not end the run. The launcher forwards them; a scheduler such as Slurm may also send
            them to every process.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        pipes: Sequence[tuple[int, int]],
        channel: socket.socket,
        grace: float | None = None,
        handed_on: Collection[int] = (),
    ) -> None:
        self._grace = grace
        self._handed_on = handed_on
        self._workers = workers
        self._pipes = pipes
        self._channel = channel
        self._received = b""
        self._running: dict[int, int] = {}  # pid -> rank
        self._sessions: set[int] = set()
        self._front_is_alive = True

    def run(self) -> None:
        """Runs the workers until they have ended."""
        front = os.getppid()
        processes.adopt_orphans()
        wake_reader, wake_writer = os.pipe()
        for end in (wake_reader, wake_writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        received: list[int] = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda number, _frame: received.append(number))
        for each in self._handed_on:
            signal.signal(each, _ignore)  # by a function, which the ranks do not inherit
        self._start_all()
        stop: tuple[int, float] | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(wake_reader, selectors.EVENT_READ)
            while self._running and stop is None:
                ready = [key.fileobj for key, _ in selector.select()]
                if wake_reader in ready:
                    os.read(wake_reader, 4096)
                self._reap()
                if self._channel in ready:
                    stop = self._read_command()
                if received:
                    self._report(event="signalled", signal=received[0])
                    stop = (received[0], GRACE_AFTER_SIGNAL if self._grace is None else self._grace)
        if stop is not None:
            self._stop_workers(*stop)
        self._finish()
        if not self._front_is_alive:
            self._print_loss(front)

    # --- start ------------------------------------------------------------------------------------------------------

    def _start_all(self) -> None:
        me = os.getpid()

        def prepare(cores: tuple[int, ...] | None) -> None:
            # In a background job Ctrl-C would otherwise stay ignored.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if cores is not None:
                os.sched_setaffinity(0, cores)
            processes.die_with_parent(me)

        for worker, (out, err) in zip(self._workers, self._pipes, strict=True):
            try:
                pid = self._start(worker, out, err, functools.partial(prepare, worker.cores))
            except OSError as error:
                self._report(event="failed_to_start", rank=worker.rank, reason=f"{worker.command[0]}: {error.strerror}")
                break
            self._running[pid] = worker.rank
            self._sessions.add(pid)
            self._report(event="started", rank=worker.rank, pid=pid)
        for pair in self._pipes:
            for end in pair:
                os.close(end)
        # A worker that could not be started leaves the others waiting for it; the front stops the run.

    def _start(self, worker: Worker, out: int, err: int, prepare: Callable[[], None]) -> int:
        own_input = worker.local_rank == 0
        if IMPORTS.can_run(worker.command, worker.environment):
            null = None if own_input else os.open(os.devnull, os.O_RDONLY)
            pid = fork_rank(worker.command, worker.environment, (null, out, err), prepare)
            if null is not None:
                os.close(null)
            return pid
        process = subprocess.Popen(
            worker.command,
            env=worker.environment,
            stdin=None if own_input else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=prepare,
        )
        process.returncode = 0  # reaped by _reap, with its orphans; the object must not try to
        return process.pid

    # --- watch ------------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Reaps every ended child, including adopted ones, and reports the workers among them."""
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self._running.pop(pid, None)
            if rank is not None:
                status = os.waitstatus_to_exitcode(wait_status)
                self._report(event="exited", rank=rank, status=status, time=time.monotonic())

    def _read_command(self) -> tuple[int, float] | None:
        try:
            data = self._channel.recv(4096)
        except ConnectionResetError:  # the front ended with messages that it had not read
            data = b""
        if not data:
            self._front_is_alive = False
            return signal.SIGTERM, GRACE_AFTER_FAILURE
        *lines, self._received = (self._received + data).split(b"\n")
        for command in map(json.loads, lines):
            if command.get("rank") is not None:
                processes.send_groups(
                    [pid for pid, rank in self._running.items() if rank == command["rank"]], command["signal"]
                )
            elif command["grace"] is None:
                self._send_ranks(command["signal"])
            else:
                return command["signal"], command["grace"]
        return None

    def _send_ranks(self, number: int) -> None:
        processes.send(self._running, number)  # not reaped yet, so no other process has a number of theirs

    def _report(self, **message: object) -> None:
        if not self._front_is_alive:
            return
        try:
            self._channel.sendall(json.dumps(message).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):  # the front is gone; its end-of-file makes us stop
            self._front_is_alive = False

    # --- stop -------------------------------------------------------------------------------------------------------

    def _stop_workers(self, number: int, grace: float) -> None:
        """Signals every worker and its children, then waits for the workers; a second command ends the wait."""
        if self._grace is not None and grace == self._grace and number == signal.SIGTERM:
            self._send_ranks(number)
        else:
            processes.send_groups(self._sessions, number)
        deadline = time.monotonic() + grace
        commands = select.poll()  # select() fails on a descriptor of 1024 or more, as many ranks have
        commands.register(self._channel, select.POLLIN)
        self._reap()
        while self._running and time.monotonic() < deadline:
            if not self._front_is_alive:
                time.sleep(_POLL_SECONDS)
            elif commands.poll(_POLL_SECONDS * 1000):
                insisted = self._read_command() is not None
                if insisted and self._front_is_alive:
                    break
            self._reap()

    def _finish(self) -> None:
        leftovers = processes.find_processes(self._sessions) - self._running.keys()
        patience = 0.0 if self._running else _GRACE_FOR_LEFTOVERS
        stuck = processes.end_processes(lambda: processes.find_processes(self._sessions), self._reap, patience)
        self._report(event="done", leftovers=len(leftovers), stuck=sorted(stuck))

    def _print_loss(self, front: int) -> None:
        """Prints that the launcher has ended, as no other process can. Prints nothing if that would block."""
        message = (
            f"deepspeed: the launcher (pid {front}) was lost, perhaps killed, so its {len(self._workers)} rank(s) on "
            f"{socket.gethostname()} were ended. Start the run again from its last checkpoint\n"
        )
        with contextlib.suppress(OSError):  # standard error is closed
            if select.select([], [2], [], 0)[1]:
                os.write(2, message.encode())


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Does nothing; the signal only wakes the loop."""
