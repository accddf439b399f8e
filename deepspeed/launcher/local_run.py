"""One run on this machine, from the first rank's start to the exit code.

The front (the process that the user started) reads the ranks' output and decides which rank failed first; the
supervisor, a fork of it, owns the ranks. The package docstring has an overview. If the run has other machines, their
launchers are connected by a :class:`~.link.LauncherLink`, and the first failure is that of the whole run.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from deepspeed.exit_notes import NOTES, ExitNotes
from deepspeed.launcher import processes
from deepspeed.launcher.failures import (
    HOLD_SECONDS,
    HOLD_SECONDS_OF_SEVERAL,
    ErrorStream,
    Failure,
    RankState,
    first_failure,
    signal_cause,
    write_failure,
)
from deepspeed.launcher.link import LauncherLink, launchers_of
from deepspeed.launcher.screen import Output, RankStream, Screen
from deepspeed.launcher.supervisor import GRACE_AFTER_FAILURE, GRACE_AFTER_SIGNAL, Supervisor, Worker, handed_on_signals

# How long a failure may wait for another one that began earlier (core dumps and interpreter shutdown take seconds).
_SETTLE_SECONDS = 3.0
_TICK_SECONDS = 0.05
_DRAIN_SECONDS = 1.0
_BLOCKED_OUTPUT_SECONDS = 2.0
_READ_BYTES = 1 << 16
_DRAIN_READS = 32
# How long a launcher waits for the hub's message about the first failure, and for launchers that have not connected yet
# to receive it.
_VERDICT_SECONDS = 6.0
_EXIT_NOTE_SECONDS = 10.0
_PART_SECONDS = 4.0  # the same after success: without the message the hub would wait for this launcher
_SHORT_EXIT_NOTE_SECONDS = 1.0  # the peer waits for this launcher to end, or was rejected
_REPORT_SECONDS = 120.0
_INTERNAL_ERROR = 70
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class LocalRun:
    """The ranks of this machine as one run.

    Args:
        logs: A file per rank for a copy of its output; None: none.
        is_whole_run: Whether ``workers`` are all ranks of the run, or the agent that starts all of them.
        labeled: Whether each line of a rank's output names the rank.
        shares_screen: Whether the launchers of the other machines write to the same screen, so that one report is
            enough; also ends the run when that screen goes away.
        grace: Seconds until ranks must have ended after a signal to stop; None: the default.
        stop_signal: An additional signal to forward to the ranks, which handle it; None: none.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        host: str,
        logs: Sequence[Path] | None = None,
        link: LauncherLink | None = None,
        is_whole_run: bool = False,
        labeled: bool | None = None,
        shares_screen: bool = False,
        failure_file: Path | None = None,
        grace: float | None = None,
        stop_signal: int | None = None,
    ) -> None:
        self._handed_on = handed_on_signals(stop_signal)
        self._stop_signal = stop_signal
        self._stop_at: float | None = None  # when the ranks must have ended after it
        self._grace = grace
        self._failure_file = failure_file
        self._workers = workers
        self._host = host
        self._output = Output()
        self._screen = Screen(self._output)
        self._link, self._is_whole_run = link, is_whole_run
        self._shares_screen = shares_screen
        # The output of a single rank is shown unchanged, without a label.
        labeled = len(workers) > 1 if labeled is None else labeled
        labels = [f"[rank {worker.rank}] ".encode() if labeled else b"" for worker in workers]
        streams = list(zip(workers, labels, strict=True))
        self._out = [RankStream(worker.rank, 1, label, self._screen) for worker, label in streams]
        self._errors = [ErrorStream(worker.rank, label, self._screen) for worker, label in streams]
        self._names = {worker.rank: worker.name for worker in workers}
        self._states = {
            worker.rank: RankState(worker.rank, errors) for worker, errors in zip(workers, self._errors, strict=True)
        }
        self._logs = dict(enumerate(path.open("ab", buffering=0) for path in logs or ()))
        self._selector = selectors.DefaultSelector()
        self._received = b""
        self._first: Failure | None = None
        self._elsewhere: list[Failure] = []  # failures that other launchers reported, until the decision
        self._verdict: Failure | None = None  # the first failure of the run, from the hub
        self._has_reported = False
        self._settle_until: float | None = None
        self._signal: int | None = None  # the signal that ends the run, ours or the supervisor's
        self._done: dict[str, Any] | None = None
        self._notes = ExitNotes(None)
        self._left_behind: dict[int, float] = {}  # ranks without which the others continue, and since when

    def run(self) -> int:
        """Runs all ranks to their end; returns 0, the first failure's code, or 128 + n for signal n.

        Must be called from the main thread: it handles signals while it runs.
        """
        # pdsh starts programs with these blocked; without the first of them no rank's end would be noticed.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGCHLD, signal.SIGTSTP, *_FORWARDED))
        notes = self._open_notes()
        others = processes.find_processes(())
        processes.adopt_orphans()
        supervisor = self._start_supervisor()
        handlers = self._catch_signals()
        if self._link is not None:
            self._link.start()
            self._selector.register(self._link, selectors.EVENT_READ)
        try:
            self._watch()
            status = os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1])
            self._selector.unregister(self._channel)  # its end has been read: select() would return at once from now on
            if self._done is None:
                self._replace_supervisor(status, others)
            self._wait_for_other_machines()
            if self._link is not None:
                self._selector.unregister(self._link)
            return self._conclude()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            processes.adopt_orphans(False)
            self._selector.close()
            self._channel.close()
            for log in self._logs.values():
                log.close()
            shutil.rmtree(notes, ignore_errors=True)

    # --- start ------------------------------------------------------------------------------------------------------

    def _open_notes(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="deepspeed-notes-"))
        for worker in self._workers:
            worker.environment[NOTES] = str(folder)
        self._notes = ExitNotes(folder)
        if self._is_whole_run:
            self._notes.starts_whole_run()
        return folder

    def _start_supervisor(self) -> int:
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
            _become_supervisor(Supervisor(self._workers, write_ends, theirs, self._grace, self._handed_on))
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
                continue  # started by nohup: the run shall outlive the terminal
            previous[number] = signal.signal(number, self._on_signal)
        for each in self._handed_on:
            handler = signal.signal(each, lambda number, _frame: self._hand_on(number))
            previous.setdefault(each, handler)
        return previous

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Signals the supervisor at once, even while the loop is blocked on the screen; the loop only listens."""
        if self._signal is None and self._first is None:
            self._signal = number
        grace = GRACE_AFTER_SIGNAL if self._grace is None else self._grace
        self._command(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, grace)

    def _take_signal(self, number: int) -> None:
        """Handles a signal to the command that started the launchers like one to this launcher."""
        if number in self._handed_on:
            self._hand_on(number)
        else:
            self._on_signal(number, None)

    def _hand_on(self, number: int) -> None:
        """Forwards a signal that the ranks handle. After that of ``--signal`` they have the time of ``--grace``."""
        if number == self._stop_signal and self._grace is not None:
            self._stop_at = self._stop_at or time.monotonic() + self._grace
        self._command(number, None)

    def _command(self, number: int, grace: float | None, rank: int | None = None) -> None:
        command = {"signal": int(number), "grace": grace, "rank": rank}
        try:
            self._channel.sendall(json.dumps(command).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return  # it has already ended, which the loop will read

    # --- watch ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        is_open = True
        while is_open and self._done is None:
            if self._output.is_full:
                # Ranks then block, as on a slow terminal; events are still handled.
                self._output.flush(_TICK_SECONDS)
                ready = [key for key, _ in self._selector.select(0) if key.fileobj is self._channel]
            else:
                ready = [key for key, _ in self._selector.select(_TICK_SECONDS)]
            for key in ready:
                if key.data is not None:
                    self._read(key)
            if any(key.fileobj is self._channel for key in ready):
                is_open = self._read_events()
            self._listen_to_others()
            now = time.monotonic()
            if not self._output.is_full:  # a rank blocked on a full pipe has not stopped writing
                is_spreading = sum(stream.is_reporting for stream in self._errors) > 1
                for errors in self._errors:
                    errors.hold_seconds = HOLD_SECONDS_OF_SEVERAL if is_spreading else HOLD_SECONDS
                for stream in (*self._out, *self._errors):
                    stream.tick(now)
            self._output.flush()
            if self._signal is None and (self._output.is_broken or (self._shares_screen and self._output.is_abandoned)):
                self._on_signal(signal.SIGPIPE, None)
            self._consider_failures(now)
            self._end_ranks_that_hang(now)

    def _end_ranks_that_hang(self, now: float) -> None:
        """Ends ranks that have not ended in time, for which this launcher would wait forever.

        They are those that the others continue without, and all ranks after the signal of ``--signal``.
        """
        for state in self._states.values() if self._do_continue else ():
            if state.status is None and self._is_left_behind(state):
                if now > self._left_behind.setdefault(state.rank, now) + GRACE_AFTER_FAILURE:
                    self._command(signal.SIGKILL, None, state.rank)
        if self._stop_at is not None and now > self._stop_at and self._signal is None and self._first is None:
            self._print_line(f"the ranks have not ended within {self._grace:g} s (--grace) of the signal of --signal")
            self._signal = self._stop_signal
            self._command(signal.SIGTERM, GRACE_AFTER_FAILURE)

    def _read(self, key: selectors.SelectorKey) -> bool:
        """Reads one pipe once; returns False when it is empty for now or closed."""
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
        if index in self._logs:
            try:
                self._logs[index].write(data)
            except OSError as error:  # such as a full disk, which is no reason to end the ranks
                log = self._logs.pop(index)
                self._print_line(f"{log.name}: cannot write: {error.strerror}; it ends here, the ranks continue")
                log.close()
        return True

    def _drain(self, rank: int | None = None) -> None:
        for key in list(self._selector.get_map().values()):
            if key.data is not None and rank in (None, key.data[0].rank):
                # More than any pipe holds, but bounded: a child of an ended rank may never stop writing.
                for _ in range(_DRAIN_READS):
                    if not self._read(key):
                        break

    def _read_events(self) -> bool:
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
            # Its last output is in the pipe by now, and shows when and why it failed.
            self._drain(state.rank)
            state.status, state.ended = message["status"], message["time"]
            if state.has_failed and state.pid is not None:
                try:
                    self._notes.note_exit(state.pid, state.cause())
                except OSError as error:  # such as a full disk, which may be why the rank has failed
                    self._print_line(f"cannot write for the other ranks why rank {state.rank} has failed: {error}")
        else:
            state.refusal, state.ended = message["reason"], time.monotonic()

    def _consider_failures(self, now: float) -> None:
        """Decides which rank failed first, as soon as that is clear, and stops the others."""
        if self._verdict is not None and self._first is None and self._signal is None:
            are_leaving = self._verdict.exit_code == os.EX_TEMPFAIL and now < (self._settle_until or now)
            if not are_leaving or not any(s.pid is not None and s.status is None for s in self._states.values()):
                self._decide(self._verdict)
            return
        failed = [state for state in self._states.values() if state.has_failed and not self._was_survived(state)]
        failures = [self._failure_of(state) for state in failed] + self._elsewhere
        if not failures or self._first is not None or self._signal is not None:
            return
        if self._do_continue and any(s.pid is not None and s.status is None for s in self._states.values()):
            return  # the others continue, or fail too
        if self._settle_until is None:
            self._settle_until = now + _SETTLE_SECONDS
        best = first_failure(failures)
        running = [state for state in self._states.values() if state.pid is not None and state.status is None]
        # A rank with an earlier traceback is ending too; a rank that lost a peer did not fail first.
        earlier = best.lost_a_peer or any(state.began_before(best) for state in running)
        if running and best.exit_code == os.EX_TEMPFAIL and now < self._settle_until:
            return  # the ranks have saved together, and leave one after the other
        if earlier and (running or self._link is not None) and now < self._settle_until:
            return
        if self._link is not None and not self._link.is_hub and not best.was_seen_from_outside:
            self._report(best)
            if now < self._settle_until + _VERDICT_SECONDS and self._link.is_connected:
                return  # the hub has the state of all machines
        self._decide(best)

    @property
    def _do_continue(self) -> bool:
        """Returns whether the other ranks continue when one is lost; on several machines they do not."""
        return self._link is None and self._notes.do_continue

    def _was_survived(self, state: RankState) -> bool:
        """Returns whether the other ranks have gone on without this one, which has failed."""
        return state.has_failed and self._is_left_behind(state)

    def _is_left_behind(self, state: RankState) -> bool:
        """Returns whether the other ranks continue without this one.

        PIDs of runs on several machines are not unique.
        """
        return self._link is None and state.pid is not None and self._notes.is_recovered(state.pid)

    def _failure_of(self, state: RankState) -> Failure:
        local = next(worker.local_rank for worker in self._workers if worker.rank == state.rank)
        pid = f", pid {state.pid}" if state.pid else ""
        return state.failure(self._names[state.rank] or f"rank {state.rank} (local rank {local}{pid})", self._host)

    def _decide(self, first: Failure) -> None:
        """Treats a failure as the first of the run: shows its rank's output and stops all other ranks."""
        self._first = first
        if self._link is not None and self._link.is_hub:
            self._report(first)
        for state in self._states.values():
            if state.rank != first.rank:
                state.errors.hold()
        if first.rank in self._states:
            self._states[first.rank].errors.release()
        # Also those whose start has not been reported yet.
        if self._done is None and any(s.status is None and s.refusal is None for s in self._states.values()):
            self._command(signal.SIGTERM, GRACE_AFTER_FAILURE)

    # --- other machines ---------------------------------------------------------------------------------------------

    def _report(self, failure: Failure) -> None:
        """Reports a failure to the hub, or as the hub to every rank, once."""
        if self._link is not None and not self._has_reported:
            self._has_reported = True
            self._link.send(event="verdict" if self._link.is_hub else "failed", **failure.to_message())

    def _listen_to_others(self) -> None:
        """Acts on messages of the launchers of other machines, and notifies them when this one is stopped."""
        if self._link is None:
            return
        if self._signal is not None and not self._has_reported and self._first is None:
            words = f"the launcher on host {self._host} was stopped by {signal_cause(self._signal)}"
            self._report(Failure(words, 128 + self._signal))
        for event in self._link.events():
            if event["event"] == "notice":
                self._print_line(event["text"])
            elif event["event"] == "failed":
                self._elsewhere.append(Failure.from_message(event))
            elif event["event"] == "lost":
                words = (
                    f"{event['who']} was lost: the connection to its launcher ended without a message (killed, "
                    "out of memory, or the machine or the network is down)"
                )
                self._elsewhere.append(Failure(words, 1, was_seen_from_outside=True))
            elif event["event"] == "wrong":
                self._elsewhere.append(Failure(event["reason"], 1, was_seen_from_outside=True))
            elif event["event"] == "signal":
                self._take_signal(event["signal"])
            elif event["event"] == "verdict" and self._first is None and self._signal is None:
                self._verdict = Failure.from_message(event)
                self._settle_until = time.monotonic() + _SETTLE_SECONDS

    def _wait_for_other_machines(self) -> None:
        """Lets the machines agree on a failure, and keeps the hub there until the last machine has finished."""
        self._listen_to_others()
        assert self._done is not None, "the run has not ended here"
        if self._done.get("status") and self._first is None and self._signal is None:
            self._report(Failure(f"the launcher on host {self._host} ended with an internal error", _INTERNAL_ERROR))
            return
        missing_until = time.monotonic() + _EXIT_NOTE_SECONDS
        while self._link is not None and self._first is None and self._signal is None:
            missing = self._link.missing
            is_needed = self._link.waits_for_others or (bool(missing) and time.monotonic() < missing_until)
            self._listen_to_others()  # after the question above: it is False only if all events can be read
            has_failed = self._verdict is not None or bool(self._elsewhere)
            has_failed = has_failed or any(state.has_failed for state in self._states.values())
            if not has_failed and not is_needed:
                if missing:
                    self._print_line(f"{launchers_of(missing)} never connected to this one, which does not wait longer")
                return
            self._consider_failures(time.monotonic())
            self._selector.select(_TICK_SECONDS)
            self._drain()
            self._output.flush()
        self._listen_to_others()  # notifies the others of a signal

    def _print_line(self, text: str) -> None:
        self._screen.line(None, 2, f"deepspeed: {text}".encode(errors="replace"))

    # --- end --------------------------------------------------------------------------------------------------------

    def _replace_supervisor(self, status: int, others: set[int]) -> None:
        """Ends the processes of a supervisor that was killed or failed; they are this process's children now."""
        sessions = {state.pid for state in self._states.values() if state.pid is not None}
        stuck = processes.end_processes(
            lambda: processes.find_processes(sessions, spare=others), lambda: None, GRACE_AFTER_FAILURE
        )
        self._done = {"leftovers": 0, "stuck": sorted(stuck), "status": status}
        if self._signal is None and self._first is None and status < 0:
            self._signal = -status

    def _conclude(self) -> int:
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._selector.get_map() and time.monotonic() < deadline:
            self._selector.select(_TICK_SECONDS)
            self._drain()
        for stream in (*self._out, *self._errors):
            stream.finish()
        failed = self._states.get(self._first.rank) if self._first is not None else None
        above = failed.report.exception if failed is not None and failed.report is not None else b""
        for state in self._states.values():
            if self._first is not None and state.rank != self._first.rank:
                where = "the failure above" if self._first.rank in self._states else "a failure on another machine"
                state.errors.shorten(f"stopped after {where}", above)
            elif self._signal is not None:
                state.errors.shorten(f"stopped by {signal.Signals(self._signal).name}")
            else:
                state.errors.release()
        self._screen.close()
        summary, code = self._summary()
        if code and self._failure_file is not None:
            wrong = write_failure(self._failure_file, summary)
            summary += [wrong] if wrong is not None else []
        if code and (report := self._notes.missing_run_report) is not None:
            summary.append(_write_run_report(report))
        for line in summary:
            self._print_line(line)
        self._output.finish(_BLOCKED_OUTPUT_SECONDS)
        if self._link is not None:
            # Otherwise a machine that starts late would wait for this one until torch's time-out.
            must_hurry = self._signal is not None or (self._first is not None and self._first.was_seen_from_outside)
            self._link.close(_SHORT_EXIT_NOTE_SECONDS if must_hurry else _EXIT_NOTE_SECONDS if code else _PART_SECONDS)
        return code

    def _have_saved(self) -> bool:
        """Returns whether all ranks exited with the code that requests another start (:mod:`deepspeed.preemption`)."""
        statuses = [state.status for state in self._states.values() if not self._was_survived(state)]
        return bool(statuses) and all(status == os.EX_TEMPFAIL for status in statuses)

    def _must_report(self, first: Failure) -> bool:
        """Returns whether this launcher reports the failure: on a shared screen only one does."""
        if not self._shares_screen or self._link is None or first.rank in self._states:
            return True
        return first.was_seen_from_outside and (self._link.is_hub or not self._link.is_connected)

    def _summary(self) -> tuple[list[str], int]:
        assert self._done is not None, "the run has not ended"
        lines = []
        if self._done["leftovers"]:
            lines.append(f"ended {self._done['leftovers']} process(es) that the ranks had left running")
        if self._done["stuck"]:
            why = "stuck in the kernel, or of another user"
            lines.append(f"processes {self._done['stuck']} on {self._host} did not end on KILL: {why}")
        first = self._first
        if self._have_saved():
            lines.append(
                f"the ranks of host {self._host} have saved and exited; start the same command again to resume"
            )
            lines.append(f"exit code {os.EX_TEMPFAIL}")
            return lines, os.EX_TEMPFAIL
        if first is not None:
            stopped = len([s for s in self._states.values() if s.rank != first.rank and s.status != 0])
            if self._must_report(first):
                lines.append(first.sentence)
                early = [state.rank for state in self._states.values() if state.status == 0]
                if first.lost_a_peer and early:
                    lines.append(f"rank(s) {', '.join(map(str, early))} ended with exit code 0, while others waited")
                whose = "the other ranks" if first.rank in self._states else f"the ranks of host {self._host}"
                others = f"; {whose} ({stopped}) were stopped" if stopped else ""
                lines.append(f"exit code {first.exit_code}{others}")
            return lines, first.exit_code
        if self._signal is not None:
            lines.append(f"the launcher on host {self._host} was stopped by {signal_cause(self._signal)}")
            lines.append(f"exit code {128 + self._signal}; no process of the {len(self._workers)} rank(s) is left")
            return lines, 128 + self._signal
        if self._done.get("status"):
            lines.append(f"internal error on host {self._host} (traceback above); exit code {_INTERNAL_ERROR}")
            return lines, _INTERNAL_ERROR
        for state in self._states.values():
            if self._was_survived(state):
                lines.append(
                    f"rank {state.rank} (pid {state.pid}) was lost: {state.cause()}; the run continued without it"
                )
        return lines, 0


def _write_run_report(folder: Path) -> str:
    """Makes the page of a run whose ranks were killed before they could; returns a line about it."""
    # A separate process, since it needs torch; in a new session, so that Ctrl-C does not end it.
    program = [sys.executable, "-m", "deepspeed.cli.report_run", str(folder)]
    try:
        done = subprocess.run(
            program, capture_output=True, text=True, timeout=_REPORT_SECONDS, start_new_session=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"run report: not written within {_REPORT_SECONDS:.0f} s; run ds_report_run {folder}"
    if done.returncode:
        return f"run report: ds_report_run {folder} failed: {(done.stderr.splitlines() or ['no message'])[-1]}"
    return f"run report: {done.stdout.strip()}"


def _become_supervisor(supervisor: Supervisor) -> None:
    """Turns the forked process into the supervisor; never returns."""
    code = _INTERNAL_ERROR
    try:
        os.setsid()
        # A reader that waits for the end of our output must not wait for this process.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
        supervisor.run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
