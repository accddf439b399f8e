"""One run on this machine, from the first rank's start to the exit code.

The front (the process the user started) reads what the ranks write and decides who failed first; the supervisor, a
fork of it, owns the ranks. See the package docstring for who watches whom.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from deepspeed.launcher import processes
from deepspeed.launcher.failures import ErrorStream, RankState, first_failure, signal_cause
from deepspeed.launcher.screen import Output, RankStream, Screen
from deepspeed.launcher.supervisor import GRACE_AFTER_FAILURE, GRACE_AFTER_SIGNAL, Supervisor, Worker

# How long a failure may wait for another one that began earlier (core dumps and interpreter shutdown take seconds).
_SETTLE_SECONDS = 3.0
_TICK_SECONDS = 0.05
_DRAIN_SECONDS = 1.0
_BLOCKED_OUTPUT_SECONDS = 2.0
_READ_BYTES = 1 << 16
_DRAIN_READS = 32
_INTERNAL_ERROR = 70
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class Job:
    """The ranks of this machine as one run.

    Args:
        workers: The ranks to start.
        host: The name of this machine in messages.
        logs: A file per rank that gets everything the rank writes, besides the screen; None for none.
    """

    def __init__(self, workers: Sequence[Worker], host: str, logs: Sequence[Path] | None = None) -> None:
        _open_standard_streams()
        self._workers = workers
        self._host = host
        self._output = Output()
        self._screen = Screen(self._output)
        # A single rank needs no label: its output looks as if it had been started by hand.
        labels = [f"[rank {worker.rank}] ".encode() if len(workers) > 1 else b"" for worker in workers]
        labelled = list(zip(workers, labels, strict=True))
        self._out = [RankStream(worker.rank, 1, label, self._screen) for worker, label in labelled]
        self._errors = [ErrorStream(worker.rank, label, self._screen) for worker, label in labelled]
        self._states = {
            worker.rank: RankState(worker.rank, errors) for worker, errors in zip(workers, self._errors, strict=True)
        }
        self._logs: list[BinaryIO] = [path.open("ab", buffering=0) for path in logs or ()]
        self._selector = selectors.DefaultSelector()
        self._received = b""
        self._first: RankState | None = None
        self._settle_until: float | None = None
        self._signal: int | None = None  # the signal that ends the run, ours or the supervisor's
        self._done: dict[str, Any] | None = None

    def run(self) -> int:
        """Runs all ranks to their end.

        Must be called from the main thread: it handles signals while it runs.

        Returns:
            The exit code: 0, the code of the rank that failed first (128 + n for signal n), or 128 + n for a signal to
            the launcher itself.
        """
        others = processes.find_processes(())
        processes.adopt_orphans()
        supervisor = self._start_supervisor()
        handlers = self._catch_signals()
        try:
            self._watch()
            status = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
            if self._done is None:
                self._replace_supervisor(status, others)
            return self._conclude()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            processes.adopt_orphans(False)
            self._selector.close()
            self._channel.close()
            for log in self._logs:
                log.close()

    # --- start ------------------------------------------------------------------------------------------------------

    def _start_supervisor(self) -> int:
        """Forks the supervisor; returns its process id."""
        read_ends, write_ends = [], []
        for _ in self._workers:
            (out_reader, out_writer), (error_reader, error_writer) = os.pipe(), os.pipe()
            read_ends.append((out_reader, error_reader))
            write_ends.append((out_writer, error_writer))
        self._channel, theirs = socket.socketpair()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        pid = os.fork()
        if pid == 0:
            self._channel.close()
            for end in (end for pair in read_ends for end in pair):
                os.close(end)
            _become_supervisor(Supervisor(self._workers, write_ends, theirs))
        theirs.close()
        for end in (end for pair in write_ends for end in pair):
            os.close(end)
        self._selector.register(self._channel, selectors.EVENT_READ)
        for index, pair in enumerate(read_ends):
            for end, stream in zip(pair, (self._out[index], self._errors[index]), strict=True):
                os.set_blocking(end, False)
                self._selector.register(end, selectors.EVENT_READ, (stream, index))
        return pid

    def _catch_signals(self) -> dict[int, Any]:
        previous: dict[int, Any] = {}
        for number in _FORWARDED:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # started by nohup: outliving the terminal is what the user wants
            previous[number] = signal.signal(number, self._on_signal)
        return previous

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Tells the supervisor at once, even while the loop is blocked on the screen; the loop only listens."""
        if self._signal is None and self._first is None:
            self._signal = number
        self._command(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, GRACE_AFTER_SIGNAL)

    def _command(self, number: int, grace: float) -> None:
        try:
            self._channel.sendall(json.dumps({"signal": int(number), "grace": grace}).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return  # it has ended already, and the loop will read that

    # --- watch ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Shows output and follows events until the supervisor is done or gone."""
        is_open = True
        while is_open and self._done is None:
            if self._output.is_full:
                # Not reading lets the ranks block, as they would on a slow terminal; events still count.
                self._output.flush(_TICK_SECONDS)
                ready = [key for key, _ in self._selector.select(0) if key.fileobj is self._channel]
            else:
                ready = [key for key, _ in self._selector.select(_TICK_SECONDS)]
            for key in ready:
                if key.data is not None:
                    self._read(key)
            if any(key.fileobj is self._channel for key in ready):
                is_open = self._read_events()
            now = time.monotonic()
            if not self._output.is_full:  # a rank that nobody reads is not one that has stopped writing
                for stream in (*self._out, *self._errors):
                    stream.tick(now)
            self._output.flush()
            if self._output.is_broken and self._signal is None:
                self._on_signal(signal.SIGPIPE, None)
            self._consider_failures(now)

    def _read(self, key: selectors.SelectorKey) -> bool:
        """Reads one pipe once; False when it is empty for now or at its end."""
        stream, index = key.data
        try:
            data = os.read(key.fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            stream.finish()
            self._selector.unregister(key.fd)
            os.close(key.fd)
            return False
        stream.feed(data)
        if self._logs:
            self._logs[index].write(data)
        return True

    def _drain(self, rank: int | None = None) -> None:
        """Reads everything that is in the pipes now, of one rank or of all."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None and rank in (None, key.data[0].rank):
                # More than any pipe holds, but bounded: a child of an ended rank may never stop writing.
                for _ in range(_DRAIN_READS):
                    if not self._read(key):
                        break

    def _read_events(self) -> bool:
        """Handles the supervisor's messages; False at their end."""
        try:
            data = self._channel.recv(_READ_BYTES)
        except ConnectionResetError:
            data = b""
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        return bool(data)

    def _handle(self, message: dict[str, Any]) -> None:
        state = self._states.get(message.get("rank", -1))
        if state is None:
            if message["event"] == "done":
                self._done = message
            elif self._signal is None:
                self._signal = message["signal"]
        elif message["event"] == "started":
            state.pid = message["pid"]
        elif message["event"] == "exited":
            # Its last words are in the pipe by now; they decide when and why it failed.
            self._drain(state.rank)
            state.status, state.ended = message["status"], message["time"]
        else:
            state.refusal, state.ended = message["reason"], time.monotonic()

    def _consider_failures(self, now: float) -> None:
        """Decides who failed first, as soon as that is clear, and has the others stopped."""
        failed = [state for state in self._states.values() if state.has_failed]
        if not failed or self._first is not None or self._signal is not None:
            return
        if self._settle_until is None:
            self._settle_until = now + _SETTLE_SECONDS
        best = first_failure(failed)
        running = [state for state in self._states.values() if state.pid is not None and state.status is None]
        # Whose traceback began earlier is dying too, and whoever lost a peer is not the first to go.
        earlier = [state for state in running if best.lost_a_peer or _began_before(state, best)]
        if earlier and now < self._settle_until:
            return
        self._first = best
        for state in self._states.values():
            if state is not best:
                state.errors.hold()
        best.errors.release()
        if running:
            self._command(signal.SIGTERM, GRACE_AFTER_FAILURE)

    # --- end --------------------------------------------------------------------------------------------------------

    def _replace_supervisor(self, status: int, others: set[int]) -> None:
        """Ends what the supervisor has left behind: it was killed or broke, and its descendants are ours now."""
        sessions = {state.pid for state in self._states.values() if state.pid is not None}
        stuck = processes.end_processes(
            lambda: processes.find_processes(sessions, spare=others), lambda: None, GRACE_AFTER_FAILURE
        )
        self._done = {"leftovers": 0, "stuck": sorted(stuck), "status": status}
        if self._signal is None and self._first is None and status < 0:
            self._signal = -status

    def _conclude(self) -> int:
        """Shows the rest, names the failure last; returns the exit code."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while len(self._selector.get_map()) > 1 and time.monotonic() < deadline:
            self._selector.select(_TICK_SECONDS)
            self._drain()
        for stream in (*self._out, *self._errors):
            stream.finish()
        for state in self._states.values():
            if self._first is not None and state is not self._first:
                state.errors.shorten("stopped after the failure above")
            elif self._signal is not None:
                state.errors.shorten(f"stopped by {_signal_name(self._signal)}")
            else:
                state.errors.release()
        self._screen.close()
        summary, code = self._summary()
        for line in summary:
            self._screen.line(None, 2, f"deepspeed: {line}".encode())
        self._output.finish(_BLOCKED_OUTPUT_SECONDS)
        return code

    def _summary(self) -> tuple[list[str], int]:
        assert self._done is not None, "the run has not ended"
        lines = []
        if self._done["leftovers"]:
            lines.append(f"ended {self._done['leftovers']} process(es) that the ranks had left running")
        if self._done["stuck"]:
            lines.append(f"processes {self._done['stuck']} on {self._host} did not end on KILL: stuck in the kernel")
        first = self._first
        if first is not None:
            stopped = len([s for s in self._states.values() if s is not first and s.status != 0])
            local = next(worker.local_rank for worker in self._workers if worker.rank == first.rank)
            pid = f", pid {first.pid}" if first.pid else ""
            lines.append(
                f"rank {first.rank} (local rank {local}{pid}) failed first on host {self._host}: {first.cause()}"
            )
            others = f"; the other ranks ({stopped}) were stopped" if stopped else ""
            lines.append(f"exit code {first.exit_code}{others}")
            return lines, first.exit_code
        if self._signal is not None:
            lines.append(f"the launcher on host {self._host} was stopped by {signal_cause(self._signal)}")
            lines.append(f"exit code {128 + self._signal}; no process of the {len(self._workers)} rank(s) is left")
            return lines, 128 + self._signal
        if self._done.get("status"):
            lines.append(f"internal error on host {self._host} (traceback above); exit code {_INTERNAL_ERROR}")
            return lines, _INTERNAL_ERROR
        return lines, 0


def _began_before(state: RankState, best: RankState) -> bool:
    report = state.errors.report_time
    return state.errors.is_reporting and report is not None and report < best.failure_time


def _open_standard_streams() -> None:
    """Fills descriptors 0 to 2 if the caller closed them: our pipes must not take their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _signal_name(number: int) -> str:
    return signal.Signals(number).name


def _become_supervisor(supervisor: Supervisor) -> None:
    """Turns the forked process into the supervisor; never returns."""
    code = _INTERNAL_ERROR
    try:
        os.setsid()
        # Whoever waits for the end of our output must not wait for this process.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        supervisor.run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
