"""Runs the commands of a run on several machines: forwards signals, and ends all together.

The programs write to the screen themselves. This process waits. When one of them fails or a signal arrives, it ends the
others and all their descendants.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

from deepspeed.launcher import processes
from deepspeed.launcher.handshake import LauncherInfo
from deepspeed.launcher.link import LauncherLink
from deepspeed.launcher.remote import Command
from deepspeed.launcher.resources import LauncherError
from deepspeed.launcher.supervisor import GRACE_AFTER_SIGNAL, handed_on_signals
from deepspeed.logging import logger

_POLL_SECONDS = 0.05
# The launchers end together because they are connected; one that takes longer than this is killed.
_GRACE_AFTER_FAILURE = 15.0
# How long a signal waits for a connection to the launchers, unless another signal arrives.
_LINK_SECONDS = 10.0
# Programs that end on a signal instead of forwarding it.
_ENDED = ("ssh", "pdsh")
_SSH_SECONDS = 10
_SSH_AT_ONCE = 32
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def require_program(name: str, launcher: str) -> None:
    """Raises LauncherError if the program of a launcher is not in ``PATH``."""
    if shutil.which(name) is None:
        raise LauncherError(
            f"--launcher {launcher}: the program {name!r} is not in PATH on this machine; install it or load its "
            "module, choose another launcher (ssh needs nothing but ssh), or start each machine with --no_ssh"
        )


def check_reachable(hosts: Sequence[str], options: Sequence[str]) -> None:
    """Logs in to every machine once, without a password. Raises LauncherError: names all that cannot be reached."""
    with ThreadPoolExecutor(min(len(hosts), _SSH_AT_ONCE)) as pool:
        answers = list(pool.map(lambda host: _ssh(host, options, "true"), hosts))
    refused = [
        f"{host} ({answer.stderr.strip() or f'exit code {answer.returncode}'})"
        for host, answer in zip(hosts, answers, strict=True)
        if answer.returncode != 0
    ]
    if refused:
        raise LauncherError(
            f"no login by ssh without a password on {'; '.join(refused)}. Correct the host file, set up ssh keys, or "
            "skip this check with --no_ssh_check"
        )


def query_address(host: str, options: Sequence[str]) -> str:
    """Returns a machine's first address, from its ``hostname -I``. Raises LauncherError: it does not reply."""
    answer = _ssh(host, options, "hostname -I")
    addresses = answer.stdout.split()
    if answer.returncode != 0 or not addresses:
        reason = answer.stderr.strip() or f"exit code {answer.returncode}, answer {answer.stdout!r}"
        raise LauncherError(
            f"the address of {host}, where rank 0 runs, is not known: 'ssh {host} hostname -I' failed ({reason}); "
            "give --master_addr"
        )
    return addresses[0]


def _ssh(host: str, options: Sequence[str], command: str) -> subprocess.CompletedProcess[str]:
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_SSH_SECONDS}", *options]
    try:
        return subprocess.run(
            ["ssh", *options, "--", host, command],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=2 * _SSH_SECONDS,
        )
    except FileNotFoundError:
        raise LauncherError("the program 'ssh' is not in PATH on this machine; install it or use --no_ssh") from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([], 255, "", f"no answer within {2 * _SSH_SECONDS} s")


def run_commands(
    commands: Sequence[Command],
    grace: float | None = None,
    stop_signal: int | None = None,
    launchers: tuple[LauncherInfo, str] | None = None,
) -> int:
    """Runs commands concurrently until all have ended.

    Must be called from the main thread: it handles signals while it runs. Signals that end the run reach the commands
    as SIGTERM. SIGUSR1, SIGUSR2 and ``stop_signal`` are forwarded unchanged, and do not end the run by themselves.

    Args:
        grace: Seconds until they must have ended after a signal to stop; None: the default.
        launchers: Identity of this process towards the launchers that the commands start, and the hub's address:
            signals are sent there, as ssh does not forward them. None: the commands forward signals themselves.

    Returns:
        0, the exit code of the command that failed first, or 128 + n for signal n. After a signal: 75 if all commands
        ended with 75, which means that all ranks have saved.
    """
    handed_on = handed_on_signals(stop_signal)
    link = None if launchers is None else LauncherLink(*launchers)
    front = _CommandRunner(GRACE_AFTER_SIGNAL if grace is None else grace, handed_on, link)
    # Started by nohup, the run outlives the terminal.
    is_detached = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and signal.SIGHUP not in handed_on
    numbers = {*_SIGNALS, *handed_on} - ({signal.SIGHUP} if is_detached else set())
    handlers: dict[int, Any] = {number: signal.signal(number, front.on_signal) for number in numbers}
    others = processes.find_processes(())
    processes.adopt_orphans()
    try:
        return front.run(commands)
    finally:
        processes.end_processes(lambda: processes.find_processes((), spare=others), lambda: None, 1.0)
        processes.adopt_orphans(False)
        if link is not None:
            link.close(0.0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


class _CommandRunner:
    def __init__(self, grace: float, handed_on: Collection[int] = (), link: LauncherLink | None = None) -> None:
        self._grace = grace
        self._handed_on = handed_on
        self._link = link
        self._is_started = False  # the link
        self._is_linked = False
        self._received: list[int] = []
        self._signal: int | None = None
        self._running: dict[subprocess.Popen[bytes], Command] = {}
        self._code = 0
        self._codes: list[int] = []

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Records the signal for the loop."""
        self._received.append(number)

    def run(self, commands: Sequence[Command]) -> int:
        self._start(commands)
        stop_at: float | None = None
        while self._running:
            time.sleep(_POLL_SECONDS)
            while self._received:
                self._take_signal(self._received.pop(0))
            self._collect()
            failed = self._signal is not None or self._code != 0
            if failed and stop_at is None:
                # Launchers that got the signal end within the grace period, and then report.
                more = _GRACE_AFTER_FAILURE if self._signal is None or self._is_linked else 0.0
                stop_at = time.monotonic() + more + (0.0 if self._signal is None else self._grace)
            if stop_at is not None and time.monotonic() > stop_at:
                break  # the caller ends the remaining processes
        if self._signal is None:
            return self._code
        have_saved = not self._running and set(self._codes) == {os.EX_TEMPFAIL}
        return os.EX_TEMPFAIL if have_saved else 128 + self._signal

    def _take_signal(self, number: int) -> None:
        is_first = self._signal is None
        if number not in self._handed_on:
            self._signal = self._signal or number
            number = signal.SIGTERM
        if self._connects():
            assert self._link is not None, "it is connected"
            self._link.send(event="signal", signal=int(number))
        elif number != signal.SIGTERM and any(command.program[0] in _ENDED for command in self._running.values()):
            why = (
                "with one machine or --elastic_training no launcher takes it; send it to the ranks themselves"
                if self._link is None
                else f"the launcher of node 0 did not answer within {_LINK_SECONDS:.0f} s; send it again once the "
                "ranks have started. If they have, choose a port that this machine reaches by DS_LINK_PORT"
            )
            logger.error(f"{signal.Signals(number).name} did not reach the ranks: {why}")
        elif is_first:
            self._send(number)

    def _connects(self) -> bool:
        """Connects to the launchers at the first signal; returns whether they are connected."""
        if self._link is None:
            return False
        if not self._is_started:
            self._is_started = True
            self._link.start()
        deadline = time.monotonic() + _LINK_SECONDS
        while self._running and not (self._link.is_connected or self._received) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self._collect()
        self._is_linked = self._link.is_connected
        return self._is_linked

    def _start(self, commands: Sequence[Command]) -> None:
        me = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for command in commands:
            with _standard_input(command, is_only=len(commands) == 1) as source:
                process = subprocess.Popen(
                    command.program,
                    env={**os.environ, **command.variables},
                    stdin=source,
                    start_new_session=True,
                    preexec_fn=lambda: processes.die_with_parent(me),
                )
            self._running[process] = command

    def _collect(self) -> None:
        for process in [process for process in self._running if process.poll() is not None]:
            command = self._running.pop(process)
            status = process.returncode
            code = status if status >= 0 else 128 - status
            self._codes.append(code)
            if code and not self._code and self._signal is None:
                self._code = code
                where = f" for {command.host}" if command.host else ""
                logger.error(f"{command.program[0]}{where} ended with exit code {self._code}")

    def _send(self, number: int) -> None:
        for process in self._running:
            process.send_signal(number)


@contextmanager
def _standard_input(command: Command, is_only: bool) -> Iterator[Any]:
    """Returns the input of a command: its script, or this process's standard input if it is the only command."""
    if command.script is None:
        yield None if is_only else subprocess.DEVNULL
        return
    with tempfile.TemporaryFile() as file:  # unnamed, so that no other process can open it
        file.write(os.fsencode(command.script) + b"\n")
        file.seek(0)
        yield file
